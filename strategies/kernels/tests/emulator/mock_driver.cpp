// A stand-in for libcuda.so.1 on machines without a GPU: its kernels run in the emulator.
//
// It is as lazy as a GPU: copies and kernels of a stream happen when somebody waits for the stream,
// so what the host changes or frees too early shows. Its memory has guards around it, starts out as
// NaN, and is only reached by copies; calls without a current context are refused.

#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <string>

#include "emulator.h"

namespace {

enum Status {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kNoDevice = 100,
  kInvalidImage = 200,
  kInvalidContext = 201,
  kNoBinary = 209,
  kInvalidHandle = 400,
  kNotFound = 500,
};

const emulator::Kernel *find(const std::string &name) {
  for (int i = 0; i < emulator::kernel_count; ++i)
    if (name == emulator::kernels[i].name) return &emulator::kernels[i];
  return nullptr;
}

constexpr size_t kGuard = 256;
constexpr unsigned char kPattern = 0xa5;

std::map<uint64_t, size_t> allocations;  // on the device
std::deque<std::function<void()>> work;
std::map<std::string, int> settings, calls;
std::vector<void *> contexts;  // the stack of current ones
int context, other_context;

bool lies_on_device(uint64_t address, size_t size) {
  auto next = allocations.upper_bound(address);
  if (next == allocations.begin()) return false;
  auto [begin, length] = *--next;
  return address + size <= begin + length;
}

void check_guards() {
  for (auto [address, size] : allocations)
    for (size_t i = 0; i < kGuard; ++i)
      if (reinterpret_cast<unsigned char *>(address)[-1 - (int64_t)i] != kPattern ||
          reinterpret_cast<unsigned char *>(address)[size + i] != kPattern)
        emulator::fail("written beyond an allocation");
}

// Counts a call, and says whether it is set to fail.
int enter(const char *name, bool needs_context = true) {
  ++calls[name];
  if (settings.count(name)) return settings[name];
  return needs_context && contexts.empty() ? kInvalidContext : kSuccess;
}

int submit(std::function<void()> what) {
  work.push_back(std::move(what));
  return kSuccess;
}

}  // namespace

#define ENTER_ANYWHERE \
  if (int status = enter(__func__, false)) return status
#define ENTER \
  if (int status = enter(__func__)) return status

extern "C" {

// --- for the tests ----------------------------------------------------------------------------

// Makes a call fail with a status, or sets what a device says of itself; back to normal with -1.
void mock_set(const char *name, int value) {
  if (value < 0)
    settings.erase(name);
  else
    settings[name] = value;
}
int mock_calls(const char *name) { return calls[name]; }
int mock_depth() { return (int)contexts.size(); }
int mock_pending() { return (int)work.size(); }
int mock_allocated() { return (int)allocations.size(); }
int mock_parameters(const char *name) { return find(name)->parameters; }
int mock_parameter_size(const char *name, int i) { return (int)find(name)->sizes[i]; }
void mock_synchronize() {
  while (!work.empty()) {
    auto next = std::move(work.front());
    work.pop_front();
    next();
  }
  check_guards();
}

// --- the driver -------------------------------------------------------------------------------

int cuInit(unsigned) {
  ENTER_ANYWHERE;
  return kSuccess;
}
int cuDriverGetVersion(int *version) {
  *version = 13000;
  return kSuccess;
}
int cuGetErrorName(int status, const char **name) {
  static const std::map<int, const char *> names = {
      {kInvalidValue, "CUDA_ERROR_INVALID_VALUE"},    {kOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY"},
      {kNoDevice, "CUDA_ERROR_NO_DEVICE"},            {kInvalidImage, "CUDA_ERROR_INVALID_IMAGE"},
      {kInvalidContext, "CUDA_ERROR_INVALID_CONTEXT"}, {kNoBinary, "CUDA_ERROR_NO_BINARY_FOR_GPU"},
      {kInvalidHandle, "CUDA_ERROR_INVALID_HANDLE"},  {kNotFound, "CUDA_ERROR_NOT_FOUND"},
      {719, "CUDA_ERROR_LAUNCH_FAILED"},
  };
  auto found = names.find(status);
  *name = found == names.end() ? nullptr : found->second;
  return found == names.end() ? kInvalidValue : kSuccess;
}
int cuGetErrorString(int, const char **text) {
  *text = "as the mock says";
  return kSuccess;
}
int cuDeviceGetCount(int *count) {
  *count = 2;
  return kSuccess;
}
int cuDeviceGet(int *device, int index) {
  *device = index;
  return kSuccess;
}
int cuDeviceGetName(char *name, int size, int device) {
  std::snprintf(name, size, "Mock GPU %d", device);
  return kSuccess;
}
int cuDeviceGetAttribute(int *value, int attribute, int) {
  if (attribute != 75 && attribute != 76) return kInvalidValue;
  const char *name = attribute == 75 ? "major" : "minor";
  *value = settings.count(name) ? settings[name] : attribute == 75 ? 9 : 0;
  return kSuccess;
}
int cuDevicePrimaryCtxRetain(void **handle, int device) {
  *handle = device ? &other_context : &context;
  return kSuccess;
}
int cuCtxPushCurrent_v2(void *handle) {
  ENTER_ANYWHERE;
  contexts.push_back(handle);
  return kSuccess;
}
int cuCtxPopCurrent_v2(void **handle) {
  ENTER;
  *handle = contexts.back();
  contexts.pop_back();
  return kSuccess;
}

// Takes what starts as a fatbin, a cubin or PTX does.
int cuLibraryLoadData(void **library, const void *code, void *, void *, unsigned, void *, void *,
                      unsigned) {
  ENTER;
  bool fatbin = !std::memcmp(code, "\x50\xed\x55\xba", 4);
  bool cubin = !std::memcmp(code, "\x7f" "ELF", 4);
  bool ptx = std::strstr(static_cast<const char *>(code), ".version") != nullptr && !fatbin && !cubin;
  if (!fatbin && !cubin && !ptx) return kInvalidImage;
  if (fatbin && settings.count("refuse fatbin")) return settings["refuse fatbin"];
  *library = &work;
  return kSuccess;
}
int cuLibraryUnload(void *) { return kSuccess; }
int cuLibraryGetKernel(void **kernel, void *, const char *name) {
  ENTER;
  *kernel = const_cast<emulator::Kernel *>(find(name));
  return *kernel ? kSuccess : kNotFound;
}
int cuKernelGetFunction(void **function, void *kernel) {
  ENTER;
  *function = kernel;
  return kSuccess;
}
int cuLaunchKernel(void *function, unsigned grid, unsigned grid_y, unsigned grid_z, unsigned block,
                   unsigned block_y, unsigned block_z, unsigned shared, void *, void **values,
                   void **extra) {
  ENTER;
  if (!grid || !block || block > 256 || shared || extra) return kInvalidValue;
  if (grid_y != 1 || grid_z != 1 || block_y != 1 || block_z != 1) return kInvalidValue;
  const auto *kernel = static_cast<const emulator::Kernel *>(function);
  // A driver copies the parameters before it returns.
  std::vector<std::vector<char>> copies;
  size_t total = 0;
  for (int i = 0; i < kernel->parameters; ++i) {
    char *value = static_cast<char *>(values[i]);
    copies.emplace_back(value, value + kernel->sizes[i]);
    total += (kernel->sizes[i] + 7) / 8 * 8;
  }
  if (total > 4096) return kInvalidValue;
  return submit([=]() mutable {
    std::vector<void *> pointers;
    for (auto &copy : copies) pointers.push_back(copy.data());
    emulator::launch(*kernel, pointers.data(), grid, block);
  });
}

int cuStreamCreate(void **stream, unsigned) {
  ENTER;
  *stream = &work;
  return kSuccess;
}
int cuStreamSynchronize(void *) {
  ENTER;
  mock_synchronize();
  return kSuccess;
}

int cuMemAlloc_v2(uint64_t *address, size_t size) {
  ENTER;
  if (settings.count("memory") && size > (size_t)settings["memory"]) return kOutOfMemory;
  size_t whole = (size + 2 * kGuard + 255) / 256 * 256;
  unsigned char *memory = static_cast<unsigned char *>(std::aligned_alloc(256, whole));
  std::memset(memory, kPattern, whole);
  std::memset(memory + kGuard, 0xff, size);
  *address = reinterpret_cast<uint64_t>(memory + kGuard);
  allocations[*address] = size;
  return kSuccess;
}
int cuMemFree_v2(uint64_t address) {
  ENTER;
  if (!work.empty()) emulator::fail("memory is freed while there is work for it");
  if (!allocations.count(address)) return kInvalidValue;
  check_guards();
  allocations.erase(address);
  std::free(reinterpret_cast<void *>(address - kGuard));
  return kSuccess;
}
int cuMemHostAlloc(void **address, size_t size, unsigned) {
  ENTER;
  *address = std::aligned_alloc(4096, (size + 4095) / 4096 * 4096);
  return kSuccess;
}
int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t size, void *) {
  ENTER;
  if (!lies_on_device(to, size)) return kInvalidValue;
  return submit([=] { std::memcpy(reinterpret_cast<void *>(to), from, size); });
}
int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t size, void *) {
  ENTER;
  if (!lies_on_device(from, size)) return kInvalidValue;
  return submit([=] { std::memcpy(to, reinterpret_cast<void *>(from), size); });
}
int cuMemsetD32Async(uint64_t to, unsigned value, size_t count, void *) {
  ENTER;
  return submit([=] {
    for (size_t i = 0; i < count; ++i) reinterpret_cast<uint32_t *>(to)[i] = value;
  });
}

}  // extern "C"
