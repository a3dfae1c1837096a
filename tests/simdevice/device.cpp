// A simulated accelerator for tests. Its memory is its own; its operators are the CPU's kernels on the same bytes; what a
// GPU refuses (host and device tensors in one operator, two devices, more memory than there is) is refused here.
//
// Two modes. *In order*: everything runs when it is called. *Late*: the default stream still runs at once, and work on any
// other stream waits until something waits for it (an event, a stream's or the device's synchronisation, a blocking
// copy), or for a second. Until then its results hold NaN; and memory that is freed while work is pending is overwritten
// with NaN, in the order of the streams that own and were recorded to use it. A missing wait, a host buffer read too early
// and a block given back too early so become wrong numbers.
#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <chrono>
#include <map>
#include <set>
#include <thread>
#include <unordered_map>

namespace sim {
namespace {

std::atomic<bool> late_mode{false};
std::atomic<int64_t> num_pending{0}, num_syncs{0}, num_launches{0}, all_launches{0};
std::atomic<int64_t> bytes_to_device{0}, bytes_to_host{0};
std::mutex sync_mutex;
std::map<std::string, int64_t> syncs_by_cause;

int64_t environment(const char* name, int64_t otherwise) {
  const char* value = std::getenv(name);
  return value ? std::stoll(value) : otherwise;
}
const int64_t num_devices = environment("THALWEG_SIM_DEVICES", 1);
const int64_t total_bytes = environment("THALWEG_SIM_BYTES", int64_t(4) << 30);
// As Apple's MPS is: one stream, no fp64, no page-locked memory.
const bool is_like_mps = environment("THALWEG_SIM_LIKE_MPS", 0);

// ---- streams -------------------------------------------------------------------------------------------------------

thread_local c10::DeviceIndex current_device = 0;
thread_local std::map<c10::DeviceIndex, c10::StreamId> current_streams;
std::mutex queues_mutex;
std::map<std::pair<c10::DeviceIndex, c10::StreamId>, std::unique_ptr<Queue>> queues;
c10::StreamId last_stream = 0;

Queue& queue_of(c10::DeviceIndex device, c10::StreamId id) {
  std::lock_guard<std::mutex> lock(queues_mutex);
  auto& queue = queues[{device, id}];
  if (!queue) queue = std::make_unique<Queue>(device, id);
  return *queue;
}
Queue& queue_of(const c10::Stream& stream) { return queue_of(stream.device_index(), stream.id()); }

std::vector<Queue*> all_queues(c10::DeviceIndex device) {
  std::lock_guard<std::mutex> lock(queues_mutex);
  std::vector<Queue*> found;
  for (auto& [key, queue] : queues)
    if (device < 0 || key.first == device) found.push_back(queue.get());
  return found;
}
void run_device(c10::DeviceIndex device) {
  for (Queue* queue : all_queues(device)) queue->run_all();
}

struct Event {
  Queue* queue = nullptr;
  int64_t number = 0;
  std::shared_ptr<std::atomic<double>> milliseconds;
  int64_t launches_before = -1;  // -1: asked for already
};
double now_ms() {
  using namespace std::chrono;
  return duration<double, std::milli>(steady_clock::now().time_since_epoch()).count();
}

constexpr double overdue_ms = 1000;
std::atomic<bool> has_watch{false};

void set_late(bool late) {
  run_device(-1);
  late_mode = late;
  if (!late || has_watch.exchange(true)) return;
  std::thread([] {
    while (late_mode) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      for (Queue* queue : all_queues(-1)) queue->run_overdue();
    }
    has_watch = false;
  }).detach();
}

// ---- memory --------------------------------------------------------------------------------------------------------

struct Block {
  size_t size = 0;
  c10::DeviceIndex device = 0;
  Queue* owner = nullptr;
  std::vector<Queue*> users;
};
struct Memory {
  int64_t live = 0, peak = 0, count = 0;
};
std::mutex memory_mutex;
std::unordered_map<void*, Block> blocks;
std::map<c10::DeviceIndex, Memory> memory;
std::vector<void*> quarantine;  // freed, but a pending kernel may still point there

void retire(void* pointer, const Block& block) {
  std::lock_guard<std::mutex> lock(memory_mutex);
  memory[block.device].live -= block.size;
  memory[block.device].count -= 1;
  if (num_pending > 0) {
    memset(pointer, 0xff, block.size);
    quarantine.push_back(pointer);
    return;
  }
  free(pointer);
  for (void* kept : quarantine) free(kept);
  quarantine.clear();
}
void release(void* pointer) {
  if (!pointer) return;
  Block block;
  {
    std::lock_guard<std::mutex> lock(memory_mutex);
    auto found = blocks.find(pointer);
    block = found->second;
    blocks.erase(found);
  }
  auto left = std::make_shared<std::atomic<int>>(1);
  auto give_back = [=] { if (--*left == 0) retire(pointer, block); };
  std::set<Queue*> waits(block.users.begin(), block.users.end());
  waits.insert(block.owner);
  for (Queue* queue : waits)
    if (queue->is_late() && !queue->is_idle()) {
      ++*left;
      queue->push(give_back);
    }
  give_back();
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    c10::Device device(kSim, current_device);
    void* pointer = nullptr;
    if (size) {
      Queue& owner = current_queue(current_device);
      std::lock_guard<std::mutex> lock(memory_mutex);
      auto& here = memory[current_device];
      TORCH_CHECK_WITH(OutOfMemoryError, here.live + (int64_t)size <= total_bytes, "sim out of memory: ", size,
                       " bytes asked for, ", here.live, " of ", total_bytes, " in use");
      if (posix_memalign(&pointer, 64, size)) throw std::bad_alloc();
      memset(pointer, 0xff, size);  // nobody may count on zeros
      blocks[pointer] = Block{size, current_device, &owner, {}};
      here.live += size;
      here.count += 1;
      here.peak = std::max(here.peak, here.live);
    }
    return {pointer, pointer, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, std::size_t size) const override { memcpy(target, source, size); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    std::lock_guard<std::mutex> lock(memory_mutex);
    auto found = blocks.find(data.get());
    if (found != blocks.end()) found->second.users.push_back(&queue_of(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(memory_mutex);
    const auto& here = memory[device];
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* one : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes}) {
      (*one)[0].current = here.live;
      (*one)[0].peak = here.peak;
    }
    stats.allocation[0].current = here.count;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(memory_mutex);
    memory[device].peak = memory[device].live;
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(memory_mutex);
    return {total_bytes - memory[device].live, total_bytes};
  }
};
Allocator allocator;
REGISTER_ALLOCATOR(kSim, &allocator);

// Page-locked host memory: known by its address.
std::mutex pinned_mutex;
std::map<char*, size_t> pinned;
int64_t pinned_bytes = 0;

void unpin(void* pointer) {
  {
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned_bytes -= pinned[(char*)pointer];
    pinned.erase((char*)pointer);
  }
  free(pointer);
}
struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* pointer = nullptr;
    if (posix_memalign(&pointer, 64, std::max<size_t>(size, 1))) throw std::bad_alloc();
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned[(char*)pointer] = std::max<size_t>(size, 1);
    pinned_bytes += size;
    return {pointer, pointer, &unpin, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* target, const void* source, std::size_t size) const override { memcpy(target, source, size); }
};
PinnedAllocator pinned_allocator;

bool is_pinned_address(const void* pointer) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  auto after = pinned.upper_bound((char*)pointer);
  if (after == pinned.begin()) return false;
  --after;
  return (char*)pointer < after->first + after->second;
}

// ---- random numbers ------------------------------------------------------------------------------------------------

// The CPU's engine behind a device's name: with the same seed it draws what the CPU would.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(c10::DeviceIndex device)
      : c10::GeneratorImpl(c10::Device(kSim, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        host(at::detail::createCPUGenerator()) {}
  at::Generator host;
  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "a simulated device's generator has no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "a simulated device's generator has no offset"); }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return host.unsafeGetGeneratorImpl()->get_state(); }
  Generator* clone_impl() const override {
    auto* copy = new Generator(device().index());
    copy->host = host.clone();
    return copy;
  }
};
at::Generator& default_generator(c10::DeviceIndex device) {
  static std::vector<at::Generator> generators = [] {
    std::vector<at::Generator> made;
    for (int64_t i = 0; i < num_devices; ++i) made.push_back(at::make_generator<Generator>(i));
    return made;
  }();
  return generators.at(device < 0 ? current_device : device);
}
at::Generator& host_generator(const at::Generator& generator) {
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->host;
}

// ---- what torch asks a device for ----------------------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kSim;
  c10::DeviceType type() const override { return kSim; }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return c10::Device(kSim, current_device); }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < num_devices, "there is no device ", device, ": ", num_devices, " in all");
    if (device.index() >= 0) current_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  c10::DeviceIndex index_of(c10::Device device) const { return device.has_index() ? device.index() : current_device; }
  c10::Stream make(c10::Device device, c10::StreamId id) const {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kSim, index_of(device)), id);
  }
  c10::Stream getStream(c10::Device device) const override { return make(device, current_streams[index_of(device)]); }
  c10::Stream getDefaultStream(c10::Device device) const override { return make(device, 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return is_like_mps ? getDefaultStream(device) : make(device, new_queue(index_of(device)).id);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return num_devices; }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event();
    auto* here = static_cast<Event*>(*event);
    auto time = std::make_shared<std::atomic<double>>(0);
    here->queue = &queue_of(stream);
    here->milliseconds = time;
    here->queue->push([time] { *time = now_ms(); });
    here->number = here->queue->queued;
    here->launches_before = all_launches;
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (!event) return;
    auto* here = static_cast<Event*>(event);
    queue_of(stream).push([queue = here->queue, number = here->number] { queue->run_until(number); });
  }
  bool queryEvent(void* event) const override {
    auto* here = static_cast<Event*>(event);
    if (!here) return true;
    // Who asks at once, before anything else is launched, comes too early in either mode.
    bool was_done = here->queue->done >= here->number && std::exchange(here->launches_before, -1) != all_launches;
    here->queue->run_until(here->number);  // it goes on by itself, only not at once
    return was_done;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  bool queryStream(const c10::Stream& stream) const override {
    bool was_done = queue_of(stream).is_idle();
    queue_of(stream).run_all();
    return was_done;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    count_sync("stream");
    queue_of(stream).run_all();
  }
  void synchronizeEvent(void* event) const override {
    count_sync("event");
    auto* here = static_cast<Event*>(event);
    if (here) here->queue->run_until(here->number);
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    count_sync("device");
    run_device(device);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    allocator.recordStream(data, stream);
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    auto *begin = static_cast<Event*>(from), *end = static_cast<Event*>(to);
    TORCH_CHECK(begin && end && begin->queue->done >= begin->number && end->queue->done >= end->number,
                "both events must be recorded and completed before their times are compared");
    return *end->milliseconds - *begin->milliseconds;
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return num_devices > 0; }
  void init() const override {}
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return num_devices; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(c10::DeviceIndex device) const override { Guard().setDevice(c10::Device(kSim, device)); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return Guard().exchangeDevice(c10::Device(kSim, device)).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  at::Allocator* getPinnedMemoryAllocator() const override {
    TORCH_CHECK(!is_like_mps, "Attempted to set the storage of a tensor on device \"cpu\" to a storage on another device");
    return &pinned_allocator;
  }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned_address(pointer); }
  at::Device getDeviceFromPtr(void* pointer) const override {
    std::lock_guard<std::mutex> lock(memory_mutex);
    auto found = blocks.find(pointer);
    return at::Device(kSim, found == blocks.end() ? current_device : found->second.device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? current_device : device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    c10::DeviceGuard guard(storage.device());
    auto fresh = allocator.allocate(size);
    size_t keep = std::min(size, impl->nbytes());
    if (keep && impl->data_ptr().get()) {
      auto *target = fresh.get(), *source = impl->mutable_data();
      current_queue(storage.device().index()).push([=] { memcpy(target, source, keep); });
    }
    impl->set_data_ptr_noswap(std::move(fresh));
    impl->set_nbytes(size);
  }
};

// ---- operators -----------------------------------------------------------------------------------------------------

bool on_device(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kSim; }

// A host tensor as an operator is given it: by its value now.
at::Tensor snapshot(const at::Tensor& tensor) {
  auto copy = tensor.clone();
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  return copy;
}

struct HostCall {
  const c10::OperatorHandle op;
  std::vector<c10::IValue> given, host;
  std::vector<std::pair<at::Tensor, at::Tensor>> written;  // (given, host)
  std::vector<at::Generator> generators;                   // of the host's kind, that the operator draws from
  bool takes_device = false;                               // whether a tensor of the device is among the arguments
  bool draws_by_default = false;                           // from the default generator, without an argument for it

  HostCall(const c10::OperatorHandle& op, const torch::jit::Stack& stack) : op(op) {
    const auto& arguments = op.schema().arguments();
    given.assign(stack.end() - arguments.size(), stack.end());
    check();
    for (size_t i = 0; i < given.size(); ++i) host.push_back(convert(given[i], arguments[i]));
    draws_by_default = generators.empty() && op.hasTag(at::Tag::nondeterministic_seeded);
    if (draws_by_default) generators.push_back(at::detail::getDefaultCPUGenerator());
  }

  // What a GPU refuses. A 0-dim host tensor may stand for a number, but not in a list and not where results go.
  void check() {
    static const std::set<std::string> takes_host_indices{"aten::index", "aten::index_put_", "aten::_index_put_impl_"};
    const auto& arguments = op.schema().arguments();
    std::optional<c10::Device> device;
    bool has_host = false;
    auto see = [&](const at::Tensor& tensor, bool may_be_number) {
      if (!tensor.defined()) return;
      if (on_device(tensor)) {
        TORCH_CHECK(!device || *device == tensor.device(), mixed(), *device, " and ", tensor.device(), "! (",
                    op.operator_name(), ")");
        device = tensor.device();
      } else if (tensor.is_cpu() && !(may_be_number && tensor.dim() == 0)) {
        has_host = true;
      }
    };
    for (size_t i = 0; i < given.size(); ++i) {
      bool written = arguments[i].alias_info() && arguments[i].alias_info()->isWrite();
      if (given[i].isTensor()) see(given[i].toTensor(), !written);
      else if (given[i].isTensorList()) for (const at::Tensor& tensor : given[i].toTensorVector()) see(tensor, false);
    }
    takes_device = device.has_value();
    TORCH_CHECK(!(device && has_host) || takes_host_indices.count(op.operator_name().name), mixed(),
                device.value_or(c10::Device(c10::kCPU)), " and cpu! (", op.operator_name(), ")");
  }
  static const char* mixed() { return "Expected all tensors to be on the same device, but found at least two devices, "; }

  at::Tensor convert(const at::Tensor& tensor, bool written) {
    if (!tensor.defined()) return tensor;
    if (!on_device(tensor)) return snapshot(tensor);
    auto alias = host_alias(tensor);
    if (written) this->written.emplace_back(tensor, alias);
    return alias;
  }
  c10::IValue convert(const c10::IValue& value, const c10::Argument& argument) {
    bool written = argument.alias_info() && argument.alias_info()->isWrite();
    if (value.isTensor()) return convert(value.toTensor(), written);
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(convert(tensor, written));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (std::optional<at::Tensor> tensor : value.toOptionalTensorVector())
        list.push_back(tensor ? std::optional<at::Tensor>(convert(*tensor, written)) : std::nullopt);
      return list;
    }
    if (value.isDevice() && value.toDevice().type() == kSim) return c10::Device(c10::kCPU);
    if (value.isGenerator() && takes_device) {
      TORCH_CHECK(value.toGenerator().device().type() == kSim, "Expected a 'sim' device type for generator but found '",
                  value.toGenerator().device(), "'");
      generators.push_back(host_generator(value.toGenerator()));
      return generators.back();
    }
    auto optional = argument.type()->cast<c10::OptionalType>();
    if (value.isNone() && optional && optional->getElementType()->kind() == c10::TypeKind::GeneratorType) {
      generators.push_back(host_generator(default_generator(-1)));
      return generators.back();
    }
    return value;
  }

  torch::jit::Stack run() const {
    at::NoGradGuard no_grad;
    at::AutoDispatchBelowADInplaceOrView below;
    torch::jit::Stack stack(host.begin(), host.end());
    if (!draws_by_default) {
      op.callBoxed(stack);
      return stack;
    }
    auto shared = at::detail::getDefaultCPUGenerator();  // lend it the device's state
    auto mine = host_generator(default_generator(-1));
    auto before = shared.clone();
    shared.set_state(mine.get_state());
    op.callBoxed(stack);
    mine.set_state(shared.get_state());
    shared.set_state(before.get_state());
    return stack;
  }
};

at::Tensor empty_like_host(const at::Tensor& host) {
  auto dense = host.is_non_overlapping_and_dense();
  auto options = host.options().device(c10::Device(kSim, current_device));
  return dense ? at::empty_strided(host.sizes(), host.strides(), options) : at::empty(host.sizes(), options);
}

void call(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  static const std::set<std::string> reads_back{"aten::equal", "aten::nonzero", "aten::masked_select", "aten::_unique2",
                                                "aten::unique_dim", "aten::bincount", "aten::repeat_interleave"};
  const auto name = op.operator_name().name;
  TORCH_CHECK(op.schema().getNamespace() == "aten" && name.find("mkldnn") == std::string::npos &&
                  name.find("_for_cpu") == std::string::npos,
              "Could not run '", op.operator_name(), "' with arguments from the 'PrivateUse1' backend: it has a kernel for the CPU alone");
  HostCall host_call(op, *stack);
  count_launch();
  c10::OptionalDeviceGuard guard;
  for (const auto& value : host_call.given)
    if (value.isTensor() && on_device(value.toTensor())) { guard.reset_device(value.toTensor().device()); break; }
  Queue& queue = current_queue(current_device);
  const bool knows_size = name == "aten::repeat_interleave" && !host_call.given.back().isNone();
  if (reads_back.count(name) && !knows_size) {
    count_sync(name.c_str());
    queue.run_all();
  }
  const bool is_late = queue.is_late();
  // A late operator runs twice: now, on what there is, for the shapes of its results; then with what it should read.
  std::vector<at::Tensor> saved, states;
  if (is_late) {
    for (auto& [given, host] : host_call.written) saved.push_back(host.clone());
    for (auto& generator : host_call.generators) states.push_back(generator.get_state());
    if (host_call.draws_by_default) states = {host_generator(default_generator(-1)).get_state()};
  }
  torch::jit::Stack results = host_call.run();
  for (size_t i = 0; i < host_call.written.size(); ++i) {
    auto& [given, host] = host_call.written[i];
    if (is_late) host.copy_(saved[i]);
    if (host.sizes() != given.sizes() || host.const_data_ptr() != given.const_data_ptr()) {
      TORCH_CHECK(!is_late, "the simulated device resizes no result on a side stream: ", op.operator_name());
      given.resize_(host.sizes());
      host_alias(given).copy_(host);
    }
  }
  const auto& schema = op.schema();
  std::vector<std::pair<size_t, at::Tensor>> fresh;  // (index of the result, its memory)
  auto to_device = [&](const at::Tensor& host, size_t index) {
    if (!host.defined()) return host;
    auto made = empty_like_host(host);
    if (is_late) fresh.emplace_back(index, host_alias(made));
    else host_alias(made).copy_(host);
    return made;
  };
  torch::jit::drop(*stack, host_call.given.size());
  for (size_t i = 0; i < results.size(); ++i) {
    const auto* alias = schema.returns()[i].alias_info();
    if (alias) {
      TORCH_CHECK(alias->isWrite(), "the simulated device lacks the view ", op.operator_name());
      size_t source = 0;
      while (!schema.arguments()[source].alias_info() || *schema.arguments()[source].alias_info() != *alias) ++source;
      stack->push_back(host_call.given[source]);
    } else if (results[i].isTensor()) {
      stack->push_back(to_device(results[i].toTensor(), i));
    } else if (results[i].isTensorList()) {
      TORCH_CHECK(!is_late, "the simulated device makes no list on a side stream: ", op.operator_name());
      c10::List<at::Tensor> list;
      for (const at::Tensor& host : results[i].toTensorVector()) list.push_back(to_device(host, i));
      stack->push_back(list);
    } else {
      stack->push_back(results[i]);
    }
  }
  if (!is_late) return;
  auto device = current_device;
  host_call.given.clear();  // the caller's tensors, which may be freed before this has run
  host_call.written.clear();
  queue.push([host_call = std::move(host_call), fresh, states, device] {
    c10::DeviceGuard guard(c10::Device(kSim, device));
    auto generators = host_call.generators;
    if (host_call.draws_by_default) generators = {host_generator(default_generator(-1))};
    std::vector<at::Tensor> after;
    for (size_t i = 0; i < states.size(); ++i) {
      after.push_back(generators[i].get_state());
      generators[i].set_state(states[i]);
    }
    auto results = host_call.run();
    for (size_t i = 0; i < states.size(); ++i) generators[i].set_state(after[i]);
    for (auto& [index, memory] : fresh) memory.copy_(results[index].toTensor());
  });
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool non_blocking) {
  count_launch();
  if (!self.numel()) return target;
  at::NoGradGuard no_grad;
  at::AutoDispatchBelowADInplaceOrView below;
  bool from = on_device(self), to = on_device(target);
  c10::DeviceGuard guard(from ? self.device() : target.device());
  Queue& queue = current_queue(current_device);
  if (from && to) {
    queue.push([source = host_alias(self), alias = host_alias(target)] { alias.copy_(source); });
    return target;
  }
  const at::Tensor& on_host = from ? target : self;
  (from ? bytes_to_host : bytes_to_device) += (from ? self : target).nbytes();  // a cast is the host's
  bool is_pinned = is_pinned_address(on_host.const_data_ptr());
  if (!non_blocking || (from && !is_pinned)) {
    count_sync(from ? "copy to the host" : "copy to the device");
    queue.run_all();
    (to ? host_alias(target) : target).copy_(from ? host_alias(self) : self);
    return target;
  }
  // Pageable memory is staged before the call returns, for which a driver may wait for the stream; pinned memory is read or
  // written when the copy's turn comes.
  if (to && !is_pinned) count_sync("copy of pageable memory");
  auto source = from ? host_alias(self) : is_pinned ? self : self.clone();
  auto alias = to ? host_alias(target) : target;
  queue.push([source, alias] {
    at::NoGradGuard no_grad;
    at::AutoDispatchBelowADInplaceOrView below;
    alias.copy_(source);
  });
  return target;
}
at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& target) {
  if (target.sizes() != self.sizes()) target.resize_(self.sizes());
  return copy_from(self, target, false);
}
at::Scalar local_scalar(const at::Tensor& self) {
  count_sync("item");
  current_queue(self.device().index()).run_all();
  return at::_local_scalar_dense(host_alias(self));
}

at::ScalarType check_dtype(std::optional<at::ScalarType> dtype) {
  auto found = c10::dtype_or_default(dtype);
  TORCH_CHECK_TYPE(!is_like_mps || (found != at::kDouble && found != at::kComplexDouble),
                   "Cannot convert a tensor of the simulated device to float64: it has none");
  return found;
}
at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &allocator,
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), check_dtype(dtype), format);
}
at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), check_dtype(dtype));
}
void grow(const at::Tensor& self) {
  int64_t last = self.storage_offset();
  for (int64_t dim = 0; dim < self.dim(); ++dim) last += (self.size(dim) - 1) * self.stride(dim);
  size_t needed = self.numel() ? (last + 1) * self.element_size() : 0;
  if (needed > self.storage().nbytes()) Hooks().resizePrivateUse1Bytes(self.storage(), needed);
}
const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  self.unsafeGetTensorImpl()->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  grow(self);
  return self;
}
at::Tensor& set_storage(at::Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size,
                        c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (stride.size() == size.size()) {
    impl->set_sizes_and_strides(sizes, C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
  } else {
    impl->set_sizes_contiguous(sizes);
    impl->set_storage_offset(offset.expect_int());
  }
  grow(self);
  return self;
}
at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  int64_t numel = source.nbytes() / self.element_size();
  return set_storage(self, std::move(source), 0, c10::SymIntArrayRef(c10::SymInt(numel)), {});
}
at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(source.storage());
  impl->set_sizes_and_strides(source.sizes(), source.strides(), source.storage_offset());
  return self;
}
at::Tensor& set_empty(at::Tensor& self) {
  c10::DeviceGuard guard(self.device());
  return set_whole_storage(self, c10::Storage(c10::Storage::use_byte_size_t(), 0, allocator.allocate(0), &allocator, true));
}
void record_stream(at::Tensor& self, c10::Stream stream) { allocator.recordStream(self.storage().data_ptr(), stream); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&call>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  // One kernel on the CPU and on GPUs, and a composition of others on a device that registers none.
  for (auto* name : {"native_layer_norm", "native_group_norm", "_grouped_mm"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&call>());
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_empty);
  m.impl("record_stream", &record_stream);
}

// What is conjugated or negated in name alone is copied as it is and not made first, for which torch would copy it.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

}  // namespace

// ---- of device.h ---------------------------------------------------------------------------------------------------

bool Queue::is_late() const { return late_mode && id != 0; }

void Queue::push(std::function<void()> work) {
  if (!is_late()) return work();
  std::lock_guard<std::mutex> lock(work_mutex_);
  work_.push_back(std::move(work));
  last_change_ = now_ms();
  ++queued;
  ++num_pending;
}

void Queue::run_until(int64_t number) {
  if (done >= number) return;
  // Another thread that runs this queue may need the interpreter to let a tensor go (torch.Event.query keeps it).
  std::optional<pybind11::gil_scoped_release> no_gil;
  if (PyGILState_Check()) no_gil.emplace();
  std::lock_guard<std::recursive_mutex> running(run_mutex_);
  while (done < number && !is_idle()) {
    std::function<void()> work;
    {
      std::lock_guard<std::mutex> lock(work_mutex_);
      work = std::move(work_.front());
      work_.pop_front();
    }
    auto finished = c10::make_scope_exit([&] { ++done; --num_pending; });
    work();
  }
}

void Queue::run_overdue() {
  if (!is_idle() && now_ms() - last_change_ > overdue_ms) run_all();
}

Queue& current_queue(c10::DeviceIndex device) { return queue_of(device, current_streams[device]); }

Queue& new_queue(c10::DeviceIndex device) {
  c10::StreamId id;
  {
    std::lock_guard<std::mutex> lock(queues_mutex);
    id = ++last_stream;
  }
  return queue_of(device, id);
}

at::Tensor host_alias(const at::Tensor& tensor) {
  const auto& storage = tensor.storage();
  c10::Storage host(c10::Storage::use_byte_size_t(), storage.nbytes(),
                    c10::DataPtr(storage.unsafeGetStorageImpl()->mutable_data(), c10::Device(c10::kCPU)),
                    c10::GetAllocator(c10::kCPU), true);
  auto alias = at::detail::make_tensor<c10::TensorImpl>(std::move(host), c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                        tensor.dtype());
  auto* impl = alias.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  if (tensor.is_conj()) alias._set_conj(true);
  if (tensor.is_neg()) alias._set_neg(true);
  return alias;
}

void count_sync(const char* what) {
  ++num_syncs;
  ++all_launches;  // time has passed
  std::lock_guard<std::mutex> lock(sync_mutex);
  ++syncs_by_cause[what];
}
void count_launch() {
  ++num_launches;
  ++all_launches;
}

void bind_collectives(py::module& m);

}  // namespace sim

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace sim;
  using no_gil = py::call_guard<py::gil_scoped_release>;
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  m.def("device_count", [] { return num_devices; });
  m.def("current_device", [] { return (int64_t)current_device; });
  m.def("set_device", [](int64_t device) { Guard().setDevice(c10::Device(kSim, device)); });
  m.def("set_late", &set_late, no_gil());
  m.def("is_late", [] { return late_mode.load(); });
  m.def("num_pending", [] { return num_pending.load(); });
  m.def("pinned_bytes", [] { std::lock_guard<std::mutex> lock(pinned_mutex); return pinned_bytes; });
  m.def("host_alias", &host_alias);
  m.def("counts", [] {
    std::lock_guard<std::mutex> lock(sync_mutex);
    return std::make_tuple(num_launches.load(), num_syncs.load(), syncs_by_cause);
  });
  m.def("copied_bytes", [] { return std::make_pair(bytes_to_device.load(), bytes_to_host.load()); });
  m.def("reset_counts", [] {
    std::lock_guard<std::mutex> lock(sync_mutex);
    num_launches = num_syncs = bytes_to_device = bytes_to_host = 0;
    syncs_by_cause.clear();
  });
  m.def("default_generator", [](int64_t device) { return default_generator(device); });
  bind_collectives(m);
}
