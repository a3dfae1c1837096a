// What both halves of the simulated accelerator share: its queues of work, and its memory seen from the host.
#pragma once
#include <ATen/ATen.h>
#include <c10/core/Stream.h>
#include <atomic>
#include <deque>
#include <functional>
#include <mutex>

namespace sim {
constexpr auto kSim = c10::DeviceType::PrivateUse1;

// A stream's work in its order. Device memory is used by raw pointer here, as kernels do: a block that is given back too
// early is not kept alive by what still reads it.
struct Queue {
  Queue(c10::DeviceIndex device, c10::StreamId id) : device(device), id(id) {}
  const c10::DeviceIndex device;
  const c10::StreamId id;
  std::atomic<int64_t> queued{0}, done{0};

  // Whether work waits here until something waits for it: on side streams of the late mode.
  bool is_late() const;
  bool is_idle() const { return done >= queued; }
  void push(std::function<void()> work);
  // Run what was queued up to this number.
  void run_until(int64_t number);
  void run_all() { run_until(queued); }
  // Run what has waited for long: a device goes on by itself, and other ranks may wait for its part of a collective.
  void run_overdue();

 private:
  std::deque<std::function<void()>> work_;
  std::atomic<double> last_change_{0};
  std::mutex work_mutex_;
  std::recursive_mutex run_mutex_;
};

Queue& current_queue(c10::DeviceIndex device);
Queue& new_queue(c10::DeviceIndex device);
// The same memory as a host tensor. It owns nothing.
at::Tensor host_alias(const at::Tensor& tensor);
// Nothing of nothing.
inline std::optional<at::Tensor> host_or_none(const std::optional<at::Tensor>& tensor) {
  return tensor && tensor->defined() ? std::optional(host_alias(*tensor)) : std::nullopt;
}
// A copy of a host tensor where ``like`` is, in its own dtype or another.
inline at::Tensor to_device(const at::Tensor& host, const at::Tensor& like, std::optional<at::ScalarType> dtype = {}) {
  auto made = at::empty_strided(
      host.sizes(), host.strides(), host.options().device(like.device()).dtype(dtype.value_or(host.scalar_type())));
  host_alias(made).copy_(host);
  return made;
}
void count_sync(const char* what);
void count_launch();
}  // namespace sim
