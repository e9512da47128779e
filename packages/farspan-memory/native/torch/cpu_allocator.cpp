// torch's CPU memory through the entry points that PyTorch calls on a GPU: the proof, on a machine
// without one, that a program computes the same bits in memory that is stitched or placed.
//
// Built by the tests against the torch at hand. As in PyTorch's own CUDAPluggableAllocator, the
// size of a block is kept here, and an address is forgotten before it is given back: another
// thread may be handed the same address at once.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <cstddef>
#include <mutex>
#include <unordered_map>

namespace {

using Alloc = void* (*)(std::size_t, int, void*);
using Free = void (*)(void*, std::size_t, int, void*);

constexpr int kDevice = 0;
constexpr std::uint8_t kPriority = 255;

class NativeMemory final : public c10::Allocator {
 public:
  NativeMemory(Alloc alloc, Free free) : alloc_(alloc), free_(free) {}

  c10::DataPtr allocate(std::size_t bytes) override {
    void* address = bytes == 0 ? nullptr : alloc_(bytes, kDevice, nullptr);
    if (address != nullptr) {
      const std::lock_guard<std::mutex> hold(mutex_);
      sizes_[address] = bytes;
    }
    return {address, address, &release, c10::Device(c10::kCPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* target, const void* source, std::size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }

  static NativeMemory* current;

 private:
  static void release(void* address) {
    if (address != nullptr) current->forget(address);
  }

  void forget(void* address) {
    std::size_t bytes = 0;
    {
      const std::lock_guard<std::mutex> hold(mutex_);
      const auto found = sizes_.find(address);
      bytes = found->second;
      sizes_.erase(found);
    }
    free_(address, bytes, kDevice, nullptr);
  }

  Alloc alloc_;
  Free free_;
  std::mutex mutex_;
  std::unordered_map<void*, std::size_t> sizes_;
};

NativeMemory* NativeMemory::current = nullptr;
c10::Allocator* before = nullptr;

}  // namespace

// Once a process; what torch holds by then goes back where it came from.
extern "C" __attribute__((visibility("default"))) void farspan_cpu_install(Alloc alloc, Free free) {
  before = c10::GetCPUAllocator();
  NativeMemory::current = new NativeMemory(alloc, free);
  c10::SetCPUAllocator(NativeMemory::current, kPriority);
}

// New tensors come from torch's own allocator again; those that live still go back to ours.
extern "C" __attribute__((visibility("default"))) void farspan_cpu_uninstall() {
  c10::SetCPUAllocator(before, kPriority);
}
