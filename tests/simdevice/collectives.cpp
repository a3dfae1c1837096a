// A communication backend of the simulated accelerator, as NCCL is: for tensors of the device alone, one device a rank, its
// work queued on a stream. The bytes travel over gloo.
#include "device.h"

#include <c10/core/DeviceGuard.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/utils/pybind.h>

#include <thread>

namespace sim {
namespace {
using c10d::ReduceOp;
using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// Done when its queue has come so far; who waits makes its own stream wait, as with NCCL.
struct SimWork final : c10d::Work {
  SimWork(int rank, Queue& queue, Tensors outputs) : Work(rank), queue_(queue), number_(queue.queued), outputs_(std::move(outputs)) {}
  bool isCompleted() override {
    queue_.run_until(number_);
    return true;
  }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override {
    current_queue(queue_.device).push([queue = &queue_, number = number_] { queue->run_until(number); });
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  Tensors result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    isCompleted();
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    future->markCompleted(c10::IValue(outputs_));
    return future;
  }

 private:
  Queue& queue_;
  int64_t number_;
  Tensors outputs_;
};

// One message under way; it holds its tensors, as NCCL's works do.
struct MessageWork final : c10d::Work {
  MessageWork(int rank, WorkPtr inner, Tensors tensors) : Work(rank), inner_(std::move(inner)), tensors_(std::move(tensors)) {}
  bool isCompleted() override { return inner_->isCompleted(); }
  bool wait(std::chrono::milliseconds timeout) override { return inner_->wait(timeout); }

 private:
  WorkPtr inner_;
  Tensors tensors_;
};

class SimBackend final : public c10d::Backend {
 public:
  SimBackend(c10::intrusive_ptr<c10d::Backend> gloo, c10::intrusive_ptr<c10d::Store> store, int rank, int size)
      : Backend(rank, size), gloo_(std::move(gloo)), store_(std::move(store)) {}

  const std::string getBackendName() const override { return "simccl"; }
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override { coalescing_ = true; }
  WorkPtr endCoalescing() override {
    coalescing_ = false;
    auto starts = std::move(starts_);
    starts_.clear();
    auto kept = std::move(kept_);
    kept_.clear();
    return submit(kept, true, [starts] {
      std::vector<WorkPtr> works;
      for (auto& start : starts)
        if (auto work = start()) works.push_back(work);
      for (auto& work : works) work->wait();
    });
  }
  void setSequenceNumberForGroup() override {}
  // What waits for a peer ends: with an error here, and without one where NCCL's kernels do.
  void abort() override {
    if (!aborted_.exchange(true)) c10::raw::intrusive_ptr::incref(gloo_.get());  // whose thread waits on, and is never joined
  }
  uint64_t getSequenceNumberForGroup() override { return sequence_; }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    return collective(tensors, {}, opts.asyncOp, [this, hosts = aliases(tensors), opts] {
      for (auto host : hosts) reduce_in_place(host, opts.reduceOp);
    });
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override {
    return collective(tensors, {}, opts.asyncOp, [this, hosts = aliases(tensors), opts] {
      for (auto host : hosts) reduce_in_place(host, opts.reduceOp);
    });
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    return collective(tensors, {}, opts.asyncOp, [this, hosts = aliases(tensors), opts] {
      auto total = hosts[0].clone();
      reduce_in_place(total, opts.reduceOp);
      if (opts.rootRank == rank_) hosts[0].copy_(total);
    });
  }
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    return collective(tensors, {}, opts.asyncOp, [this, hosts = aliases(tensors), opts] {
      auto sent = hosts;
      finish(gloo_->broadcast(sent, opts));
    });
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) override {
    return collective({output}, {input}, opts.asyncOp, [this, out = host_alias(output), in = host_alias(input)] {
      gather_rows(out, in);
    });
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    return collective(outputs[0], inputs, opts.asyncOp, [this, outs = aliases(outputs[0]), in = host_alias(inputs[0])] {
      std::vector<Tensors> received{outs};
      Tensors sent{in};
      finish(gloo_->allgather(received, sent));
    });
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    return collective(outputs, inputs, opts.asyncOp, [this, outs = aliases(outputs), ins = aliases(inputs)] {
      for (size_t i = 0; i < outs.size(); ++i) gather_rows(outs[i], ins[i]);
    });
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) override {
    return collective({output}, {input}, opts.asyncOp, [this, out = host_alias(output), in = host_alias(input), opts] {
      scatter_sum(out, in, opts.reduceOp);
    });
  }
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& opts) override {
    return collective(outputs, inputs[0], opts.asyncOp, [this, out = host_alias(outputs[0]), ins = aliases(inputs[0]), opts] {
      Tensors flat;
      for (auto& in : ins) flat.push_back(in.reshape(-1));
      auto result = at::empty({out.numel()}, out.options());
      scatter_sum(result, at::cat(flat), opts.reduceOp);
      out.copy_(result.view_as(out));
    });
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) override {
    return collective(outputs, inputs, opts.asyncOp, [this, outs = aliases(outputs), ins = aliases(inputs), opts] {
      for (size_t i = 0; i < outs.size(); ++i) scatter_sum(outs[i], ins[i], opts.reduceOp);
    });
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& opts) override {
    return collective({output}, {input}, opts.asyncOp,
                      [this, out = host_alias(output), in = host_alias(input), output_splits, input_splits] {
      auto received = out, sent = in;
      auto received_splits = output_splits, sent_splits = input_splits;
      finish(gloo_->alltoall_base(received, sent, received_splits, sent_splits));
    });
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override {
    return collective(outputs, inputs, opts.asyncOp, [this, outs = aliases(outputs), ins = aliases(inputs)] {
      std::vector<int64_t> output_splits, input_splits;
      Tensors sent;
      for (auto& out : outs) output_splits.push_back(out.numel());
      for (auto& in : ins) {
        input_splits.push_back(in.numel());
        sent.push_back(in.reshape(-1));
      }
      auto input = at::cat(sent);
      auto output = at::empty({std::accumulate(output_splits.begin(), output_splits.end(), int64_t(0))}, input.options());
      finish(gloo_->alltoall_base(output, input, output_splits, input_splits));
      auto parts = output.split_with_sizes(output_splits);
      for (size_t i = 0; i < outs.size(); ++i) outs[i].copy_(parts[i].view_as(outs[i]));
    });
  }
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override {
    Tensors all = outputs.empty() ? Tensors{} : outputs[0];
    return collective(all, inputs, opts.asyncOp, [this, outs = aliases(all), in = host_alias(inputs[0]), opts] {
      std::vector<Tensors> received;
      if (rank_ == opts.rootRank) received.push_back(outs);
      Tensors sent{in};
      finish(gloo_->gather(received, sent, opts));
    });
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) override {
    Tensors all = inputs.empty() ? Tensors{} : inputs[0];
    return collective(outputs, all, opts.asyncOp, [this, out = host_alias(outputs[0]), ins = aliases(all), opts] {
      std::vector<Tensors> sent;
      if (rank_ == opts.rootRank) sent.push_back(ins);
      Tensors received{out};
      finish(gloo_->scatter(received, sent, opts));
    });
  }
  WorkPtr barrier(const c10d::BarrierOptions&) override {
    check_devices();
    return submit({}, true, [this] { finish(gloo_->barrier()); });
  }
  WorkPtr send(Tensors& tensors, int target, int tag) override {
    return point_to_point(tensors, [this, hosts = aliases(tensors), target, tag] {
      auto sent = hosts;
      return gloo_->send(sent, target, tag);
    });
  }
  WorkPtr recv(Tensors& tensors, int source, int tag) override {
    return point_to_point(tensors, [this, hosts = aliases(tensors), source, tag] {
      auto received = hosts;
      return gloo_->recv(received, source, tag);
    });
  }

 private:
  c10::intrusive_ptr<c10d::Backend> gloo_;
  c10::intrusive_ptr<c10d::Store> store_;
  Queue* queue_ = nullptr;
  std::pair<Queue*, int64_t> last_{nullptr, 0};
  bool coalescing_ = false, devices_checked_ = false;
  std::atomic<bool> aborted_{false};
  uint64_t sequence_ = 0;
  std::vector<std::function<WorkPtr()>> starts_;
  Tensors kept_;

  static Tensors aliases(const Tensors& tensors) {
    Tensors hosts;
    for (auto& tensor : tensors) hosts.push_back(host_alias(tensor));
    return hosts;
  }
  static void check(const Tensors& tensors) {
    for (auto& tensor : tensors) {
      TORCH_CHECK(tensor.device().type() == kSim, "No backend type associated with device type ", tensor.device().type(),
                  ": this group has none but the simulated device's");
      TORCH_CHECK(tensor.is_contiguous(), "Tensors must be contiguous");
    }
  }
  // NCCL refuses two ranks on a device when it first communicates.
  void check_devices() {
    if (std::exchange(devices_checked_, true)) return;
    c10::Device mine = c10::impl::VirtualGuardImpl(kSim).getDevice();
    char host[256] = {};
    gethostname(host, sizeof(host) - 1);
    auto key = [](int rank) { return "device of " + std::to_string(rank); };
    auto name = [](const std::vector<uint8_t>& bytes) { return std::string(bytes.begin(), bytes.end()); };
    std::string here = std::string(host) + " " + mine.str();
    store_->set(key(rank_), std::vector<uint8_t>(here.begin(), here.end()));
    for (int other = 0; other < size_; ++other)
      TORCH_CHECK_WITH(DistBackendError, other == rank_ || name(store_->get(key(other))) != here,
                       "Duplicate GPU detected : rank ", rank_, " and rank ", other, " both on ", here);
  }

  WorkPtr collective(const Tensors& outputs, const Tensors& inputs, bool is_async, std::function<void()> run) {
    Tensors all(outputs);
    all.insert(all.end(), inputs.begin(), inputs.end());
    check(all);
    check_devices();
    if (coalescing_) {
      starts_.push_back([run] { run(); return WorkPtr(); });
      kept_.insert(kept_.end(), all.begin(), all.end());
      return WorkPtr();
    }
    return submit(all, is_async, std::move(run), outputs);
  }
  WorkPtr point_to_point(const Tensors& tensors, std::function<WorkPtr()> start) {
    check(tensors);
    if (coalescing_) {
      starts_.push_back(start);
      kept_.insert(kept_.end(), tensors.begin(), tensors.end());
      return WorkPtr();
    }
    // Two ranks may each send before they receive: what is not in a group starts at once, and is waited for by itself.
    current_queue(tensors[0].device().index()).run_all();
    return c10::make_intrusive<MessageWork>(rank_, start(), tensors);
  }
  // On the group's own stream, which waits for the caller's; a blocking collective on the caller's.
  WorkPtr submit(const Tensors& used, bool is_async, std::function<void()> run, const Tensors& outputs = {}) {
    ++sequence_;
    auto device = used.empty() ? c10::impl::VirtualGuardImpl(kSim).getDevice().index() : used[0].device().index();
    Queue* caller = &current_queue(device);
    if (!queue_) queue_ = &new_queue(device);
    Queue* queue = is_async ? queue_ : caller;
    count_launch();
    if (queue != caller) queue->push([caller, number = caller->queued.load()] { caller->run_until(number); });
    // One communicator's work is done in the order in which it was given, whatever the streams.
    // ``used``: as NCCL's work does, the queue keeps the tensors until it has come here.
    auto before = std::exchange(last_, {queue, queue->queued + 1});
    queue->push([used, run, before] {
      if (before.first) before.first->run_until(before.second);
      at::NoGradGuard no_grad;
      run();
    });
    return c10::make_intrusive<SimWork>(rank_, *queue, outputs);
  }

  // Until the work is done or the group aborted: gloo itself has no word for that.
  void finish(const WorkPtr& work) {
    for (int microseconds = 20; !work->isCompleted(); microseconds = std::min(2 * microseconds, 1000)) {
      TORCH_CHECK_WITH(DistBackendError, !aborted_, "the simulated communicator was aborted");
      std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
    }
    work->wait();
  }
  // In what order sums are formed is gloo's matter, as on the CPU; what gloo has no word for is done around it.
  void reduce_in_place(at::Tensor& host, const ReduceOp& op) {
    if (op.op_ == ReduceOp::PREMUL_SUM) host.mul_(factor_of(op));
    c10d::AllreduceOptions opts;
    opts.reduceOp = plain(op);
    Tensors tensors{host};
    finish(gloo_->allreduce(tensors, opts));
    if (op.op_ == ReduceOp::AVG) host.div_(size_);
  }
  void scatter_sum(const at::Tensor& output, const at::Tensor& input, const ReduceOp& op) {
    c10d::ReduceScatterOptions opts;
    opts.reduceOp = plain(op);
    auto received = output;
    auto sent = op.op_ == ReduceOp::PREMUL_SUM ? input.mul(factor_of(op)) : input;
    gloo_->_reduce_scatter_base(received, sent, opts)->wait();  // not aborted: gloo's never says that it is done
    if (op.op_ == ReduceOp::AVG) received.div_(size_);
  }
  void gather_rows(const at::Tensor& output, const at::Tensor& input) {
    auto received = output;
    auto sent = input.clone();  // FSDP2's is a part of its output
    finish(gloo_->_allgather_base(received, sent));
  }
  static ReduceOp plain(const ReduceOp& op) {
    return op.op_ == ReduceOp::AVG || op.op_ == ReduceOp::PREMUL_SUM ? ReduceOp(ReduceOp::SUM) : op;
  }
  static double factor_of(const ReduceOp& op) {
    // The older of its two names, which torch 2.13 keeps.
    auto* supplement = dynamic_cast<c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
    return supplement->tensor_factor.defined() ? supplement->tensor_factor.cpu().item<double>() : supplement->double_factor;
  }
};
}  // namespace

void bind_collectives(py::module& m) {
  m.def("make_backend",
        [](c10::intrusive_ptr<c10d::Backend> gloo, c10::intrusive_ptr<c10d::Store> store, int rank, int size) {
          return c10::intrusive_ptr<c10d::Backend>(c10::make_intrusive<SimBackend>(gloo, store, rank, size));
        });
}
}  // namespace sim
