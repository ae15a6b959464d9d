// Counts what torch allocates on the CPU: current and peak bytes, over all threads.
//
// c10's own profiling hook counts only threads that a profiler was started in, and keeps every event; a
// wrapper around the default allocator costs a hash-map access per tensor and can stay on for a whole run.
// The pointer stays its own context, as c10's raw_allocate expects.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <unordered_map>

namespace {

std::mutex lock;
std::unordered_map<void*, size_t> sizes;
int64_t current_bytes = 0;
int64_t peak_bytes = 0;
c10::Allocator* inner = nullptr;

void release(void* pointer) {
  {
    std::lock_guard<std::mutex> held(lock);
    auto found = sizes.find(pointer);
    if (found != sizes.end()) {
      current_bytes -= static_cast<int64_t>(found->second);
      sizes.erase(found);
    }
  }
  inner->raw_deleter()(pointer);
}

struct CountingAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* pointer = inner->raw_allocate(bytes);
    if (pointer == nullptr) {
      return {nullptr, nullptr, &c10::detail::deleteNothing, c10::Device(c10::DeviceType::CPU)};
    }
    std::lock_guard<std::mutex> held(lock);
    sizes[pointer] = bytes;
    current_bytes += static_cast<int64_t>(bytes);
    peak_bytes = std::max(peak_bytes, current_bytes);
    return {pointer, pointer, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }
  void copy_data(void* dest, const void* src, std::size_t count) const override {
    default_copy_data(dest, src, count);
  }
};

CountingAllocator counting;

}  // namespace

extern "C" {

// Allocations from here on are counted; earlier ones stay with the allocator that made them.
void vlfit_install() {
  if (inner == nullptr) {
    inner = c10::GetCPUAllocator();
    c10::SetCPUAllocator(&counting, /*priority=*/255);
  }
}

int64_t vlfit_current_bytes() {
  std::lock_guard<std::mutex> held(lock);
  return current_bytes;
}

int64_t vlfit_peak_bytes() {
  std::lock_guard<std::mutex> held(lock);
  return peak_bytes;
}

void vlfit_reset_peak() {
  std::lock_guard<std::mutex> held(lock);
  peak_bytes = current_bytes;
}
}
