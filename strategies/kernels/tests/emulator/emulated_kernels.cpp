// kernels.cu, compiled for the emulator, and the list of its kernels.

#include "emulator.h"

#include <utility>

#include "kernels.cu"

namespace emulator {
namespace {

template <auto kernel>
struct Described;

template <class... P, void (*function)(P...)>
struct Described<function> {
  static constexpr size_t sizes[] = {sizeof(P)...};

  template <size_t... I>
  static void apply(void *const *values, std::index_sequence<I...>) {
    function(*static_cast<P *>(values[I])...);
  }

  static void call(void *const *values) { apply(values, std::index_sequence_for<P...>()); }

  static constexpr Kernel as(const char *name) { return {name, sizeof...(P), sizes, call}; }
};

}  // namespace

#define KERNEL(name) Described<name>::as(#name)

const Kernel kernels[] = {
    KERNEL(fdk_update),          KERNEL(fdk_combine),         KERNEL(fdk_pairwise),
    KERNEL(fdk_mix),             KERNEL(fdk_mix_pairwise),    KERNEL(fdk_mix_update),
    KERNEL(fdk_sums_without),    KERNEL(fdk_finite),          KERNEL(fdk_pack),
    KERNEL(fdk_pack_all),        KERNEL(fdk_assemble),        KERNEL(fdk_average),
    KERNEL(fdk_encode_bfloat16), KERNEL(fdk_decode_bfloat16), KERNEL(fdk_encode_float16),
    KERNEL(fdk_decode_float16),  KERNEL(fdk_encode_int8),     KERNEL(fdk_decode_int8),
};
const int kernel_count = sizeof(kernels) / sizeof(kernels[0]);

}  // namespace emulator
