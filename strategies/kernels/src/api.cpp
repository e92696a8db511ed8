// The C interface: what is refused, which instruction set works, and how the work is shared out.

#include "flwr_decentral_kernels.h"

#ifdef FDK_X86_UNITS
#include <cpuid.h>
#endif
#include <stdlib.h>
#include <string.h>

#include <atomic>

#include "codecs.h"
#include "threads.h"
#include "unit.h"

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "wires are little-endian, and so must the machine be"
#endif

#define FDK_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using fdk::share_out;

enum { GRAIN = 4096 };  // coordinates that are never split among threads; a multiple of FDK_BLOCK

const int64_t LONGEST = INT64_MAX / 16;

int32_t look_for_isas() {
#ifdef FDK_X86_UNITS
  __builtin_cpu_init();
  // All that -march lets the compiler use; not every compiler has names for the last ones.
  uint32_t rest, features = 0, more = 0;
  __get_cpuid(1, &rest, &rest, &features, &rest);
  __get_cpuid(0x80000001, &rest, &rest, &more, &rest);
  const bool v2 = __builtin_cpu_supports("sse3") && __builtin_cpu_supports("ssse3") &&
                  __builtin_cpu_supports("sse4.1") && __builtin_cpu_supports("sse4.2") &&
                  __builtin_cpu_supports("popcnt") && features & bit_CMPXCHG16B &&
                  more & bit_LAHF_LM;
  const bool v3 = v2 && __builtin_cpu_supports("avx") && __builtin_cpu_supports("avx2") &&
                  __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
                  __builtin_cpu_supports("fma") && features & bit_F16C &&
                  features & bit_MOVBE && more & bit_LZCNT;
  return 1 << 1 | v2 << 2 | v3 << 3;
#else
  return 1 << 1;
#endif
}

// Looked for once: a virtual machine leaves to its host for each cpuid, which takes microseconds.
int32_t usable() {
  static std::atomic<int32_t> found{0};
  int32_t isas = found.load(std::memory_order_relaxed);
  if (!isas) found.store(isas = look_for_isas(), std::memory_order_relaxed);
  return isas;
}

// The unit of an instruction set, or of the best one; null if it cannot be used.
const fdk_unit *unit_of(int32_t isa) {
  const int32_t here = usable();
  if (isa < 0 || isa > 3 || (isa && !(here >> isa & 1))) return nullptr;
#ifdef FDK_X86_UNITS
  if (isa == 3 || (isa == 0 && here >> 3 & 1)) return &fdk_unit_v3;
  if (isa == 2 || (isa == 0 && here >> 2 & 1)) return &fdk_unit_v2;
#endif
  return &fdk_unit_base;
}

bool make_partition(int64_t size, uint32_t fragments, uint32_t granularity, uint64_t key,
                    fdk_partition *p) {
  if (size < 0 || size > LONGEST || fragments < 1) return false;
  if (fragments > (size ? size : 1)) return false;
  if (granularity < 1 || granularity & (granularity - 1)) return false;
  const int64_t group = (int64_t)fragments * granularity;
  if (group > INT32_MAX || size / group >= UINT32_MAX) return false;
  *p = {size, fragments, granularity, (uint32_t)key, (uint32_t)(key >> 32)};
  return true;
}

// Groups that are never split among threads.
int64_t grain_of(const fdk_partition &p) {
  const int64_t groups = GRAIN / ((int64_t)p.fragments * p.granularity);
  return groups < 1 ? 1 : groups;
}

int64_t wire_bytes(int64_t length, int32_t wire) {
  switch (wire) {
    case FDK_FLOAT32: return 4 * length;
    case FDK_BFLOAT16:
    case FDK_FLOAT16: return 2 * length;
    default: return length + 4 * ((length + FDK_BLOCK - 1) / FDK_BLOCK);
  }
}

// Whether a length, a wire and an instruction set will do.
int32_t refuse(int64_t length, const fdk_unit *unit) {
  if (length < 0 || length > LONGEST) return FDK_BAD_LENGTH;
  return unit ? FDK_OK : FDK_BAD_ISA;
}

}  // namespace

FDK_EXPORT int32_t fdk_abi(void) { return FDK_ABI; }

FDK_EXPORT int32_t fdk_isas(void) { return usable(); }

FDK_EXPORT int64_t fdk_fragment(int64_t size, uint32_t fragments, uint32_t granularity,
                                uint64_t key, uint32_t fragment) {
  fdk_partition p;
  if (!make_partition(size, fragments, granularity, key, &p)) return FDK_BAD_PARTITION;
  return fragment < fragments ? fdk_fragment_length(&p, fragment) : (int64_t)FDK_BAD_FRAGMENT;
}

FDK_EXPORT int32_t fdk_pack(const float *x, int64_t size, uint32_t fragments, uint32_t granularity,
                            uint64_t key, uint32_t fragment, float *out, int32_t isa,
                            int32_t threads) {
  fdk_partition p;
  const fdk_unit *unit = unit_of(isa);
  if (!unit) return FDK_BAD_ISA;
  if (!make_partition(size, fragments, granularity, key, &p)) return FDK_BAD_PARTITION;
  if (fragment >= fragments) return FDK_BAD_FRAGMENT;
  const int64_t whole = fdk_whole_groups(&p);
  share_out(threads, whole, grain_of(p),
            [&](int64_t from, int64_t to) { unit->pack(p, x, fragment, out, from, to); });
  int64_t start;
  const int64_t length = fdk_tail(&p, fragment, &start);
  if (length) memcpy(out + whole * granularity, x + start, sizeof(float) * length);
  return FDK_OK;
}

FDK_EXPORT int32_t fdk_pack_all(const float *x, int64_t size, uint32_t fragments,
                                uint32_t granularity, uint64_t key, float *const *outs,
                                int32_t isa, int32_t threads) {
  fdk_partition p;
  const fdk_unit *unit = unit_of(isa);
  if (!unit) return FDK_BAD_ISA;
  if (!make_partition(size, fragments, granularity, key, &p)) return FDK_BAD_PARTITION;
  const int64_t whole = fdk_whole_groups(&p);
  share_out(threads, whole, grain_of(p),
            [&](int64_t from, int64_t to) { unit->pack_all(p, x, outs, from, to); });
  for (uint32_t k = 0; k < fragments; k++) {
    int64_t start;
    const int64_t length = fdk_tail(&p, k, &start);
    if (length) memcpy(outs[k] + whole * granularity, x + start, sizeof(float) * length);
  }
  return FDK_OK;
}

FDK_EXPORT int32_t fdk_assemble(const float *const *payloads, int64_t size, uint32_t fragments,
                                uint32_t granularity, uint64_t key, float *out, int32_t isa,
                                int32_t threads) {
  fdk_partition p;
  const fdk_unit *unit = unit_of(isa);
  if (!unit) return FDK_BAD_ISA;
  if (!make_partition(size, fragments, granularity, key, &p)) return FDK_BAD_PARTITION;
  const int64_t whole = fdk_whole_groups(&p);
  share_out(threads, whole, grain_of(p),
            [&](int64_t from, int64_t to) { unit->assemble(p, payloads, out, from, to); });
  for (uint32_t k = 0; k < fragments; k++) {
    int64_t start;
    const int64_t length = fdk_tail(&p, k, &start);
    if (length) memcpy(out + start, payloads[k] + whole * granularity, sizeof(float) * length);
  }
  return FDK_OK;
}

namespace {

// The group after the whole ones.
void average_tail(const fdk_partition &p, const float *x, const fdk_inbox &inbox, float *out) {
  const int64_t offset = fdk_whole_groups(&p) * p.granularity;
  for (uint32_t k = 0; k < p.fragments; k++) {
    int64_t start;
    const int64_t length = fdk_tail(&p, k, &start);
    const int64_t first = inbox.first[k], last = inbox.first[k + 1];
    const float factor = 1.0f / (float)(1 + last - first);
    if (first == last) {
      if (length && x != out) memcpy(out + start, x + start, sizeof(float) * length);
      continue;
    }
    for (int64_t t = 0; t < length; t++) {
      float sum = x[start + t];
      for (int64_t i = first; i < last; i++) sum += inbox.payloads[i][offset + t];
      out[start + t] = sum * factor;
    }
  }
}

}  // namespace

FDK_EXPORT int32_t fdk_average(const float *x, int64_t size, uint32_t fragments,
                               uint32_t granularity, uint64_t key, int64_t count,
                               const uint32_t *which, const float *const *payloads, float *out,
                               int32_t isa, int32_t threads) {
  fdk_partition p;
  const fdk_unit *unit = unit_of(isa);
  if (!unit) return FDK_BAD_ISA;
  if (!make_partition(size, fragments, granularity, key, &p)) return FDK_BAD_PARTITION;
  if (count < 0 || count > LONGEST) return FDK_BAD_COUNT;
  for (int64_t i = 0; i < count; i++)
    if (which[i] >= fragments) return FDK_BAD_FRAGMENT;
  // Sort by fragment, keeping the order within each.
  int64_t *first = static_cast<int64_t *>(calloc((size_t)fragments + 2, sizeof(int64_t)));
  const float **sorted = static_cast<const float **>(malloc((count + 1) * sizeof(float *)));
  if (!first || !sorted) {
    free(first);
    free(sorted);
    return FDK_NO_MEMORY;
  }
  // first[k + 1] is where the next piece of k goes, and in the end where those of k + 1 begin.
  for (int64_t i = 0; i < count; i++) first[which[i] + 2]++;
  for (uint32_t k = 0; k < fragments; k++) first[k + 1] += first[k];
  for (int64_t i = 0; i < count; i++) sorted[first[which[i] + 1]++] = payloads[i];
  const fdk_inbox inbox = {first, sorted};
  share_out(threads, fdk_whole_groups(&p), grain_of(p),
            [&](int64_t from, int64_t to) { unit->average(p, x, inbox, out, from, to); });
  average_tail(p, x, inbox, out);
  free(first);
  free(sorted);
  return FDK_OK;
}

FDK_EXPORT int32_t fdk_combine(const float *const *vectors, const float *weights, int64_t count,
                               int64_t length, float *out, int32_t isa, int32_t threads) {
  const fdk_unit *unit = unit_of(isa);
  if (int32_t error = refuse(length, unit)) return error;
  if (count < 1) return FDK_BAD_COUNT;
  share_out(threads, length, GRAIN, [&](int64_t from, int64_t to) {
    unit->combine(vectors, weights, count, out, from, to);
  });
  return FDK_OK;
}

FDK_EXPORT int32_t fdk_sums_without(const float *const *vectors, int64_t count,
                                    const int64_t *left_out, int64_t outputs, int64_t length,
                                    float *const *outs, int32_t isa, int32_t threads) {
  const fdk_unit *unit = unit_of(isa);
  if (int32_t error = refuse(length, unit)) return error;
  if (count < 2 || outputs < 0 || outputs > count) return FDK_BAD_COUNT;
  for (int64_t j = 0; j < outputs; j++)
    if (left_out[j] < (j ? left_out[j - 1] + 1 : 0) || left_out[j] >= count) return FDK_BAD_COUNT;
  share_out(threads, length, GRAIN, [&](int64_t from, int64_t to) {
    unit->sums_without(vectors, count, left_out, outputs, outs, from, to);
  });
  return FDK_OK;
}

FDK_EXPORT int32_t fdk_update(const float *x, const float *before, const float *after,
                              int64_t length, float *out, int32_t isa, int32_t threads) {
  const fdk_unit *unit = unit_of(isa);
  if (int32_t error = refuse(length, unit)) return error;
  share_out(threads, length, GRAIN,
            [&](int64_t from, int64_t to) { unit->update(x, before, after, out, from, to); });
  return FDK_OK;
}

FDK_EXPORT int32_t fdk_pairwise(const float *x, const float *mine, const float *theirs,
                                float weight, int64_t length, float *out, int32_t isa,
                                int32_t threads) {
  const fdk_unit *unit = unit_of(isa);
  if (int32_t error = refuse(length, unit)) return error;
  share_out(threads, length, GRAIN, [&](int64_t from, int64_t to) {
    unit->pairwise(x, mine, theirs, weight, out, from, to);
  });
  return FDK_OK;
}

FDK_EXPORT int32_t fdk_mix(const float *x, const float *y, float share, int64_t length,
                           float *out_x, float *out_y, int32_t isa, int32_t threads) {
  const fdk_unit *unit = unit_of(isa);
  if (int32_t error = refuse(length, unit)) return error;
  share_out(threads, length, GRAIN,
            [&](int64_t from, int64_t to) { unit->mix(x, y, share, out_x, out_y, from, to); });
  return FDK_OK;
}

FDK_EXPORT int32_t fdk_mix_pairwise(const float *x, const float *y, const float *mine,
                                    const float *theirs, int32_t mixing, float share,
                                    float weight_x, float weight_y, int64_t length, float *out_x,
                                    float *out_y, int32_t isa, int32_t threads) {
  const fdk_unit *unit = unit_of(isa);
  if (int32_t error = refuse(length, unit)) return error;
  share_out(threads, length, GRAIN, [&](int64_t from, int64_t to) {
    unit->mix_pairwise(x, y, mine, theirs, mixing != 0, share, weight_x, weight_y, out_x, out_y,
                       from, to);
  });
  return FDK_OK;
}

FDK_EXPORT int32_t fdk_mix_update(const float *x, const float *y, const float *before,
                                  const float *after, int32_t mixing, float share, int64_t length,
                                  float *out_x, float *out_y, int32_t isa, int32_t threads) {
  const fdk_unit *unit = unit_of(isa);
  if (int32_t error = refuse(length, unit)) return error;
  share_out(threads, length, GRAIN, [&](int64_t from, int64_t to) {
    unit->mix_update(x, y, before, after, mixing != 0, share, out_x, out_y, from, to);
  });
  return FDK_OK;
}

FDK_EXPORT int32_t fdk_finite(const float *x, int64_t length, int32_t isa, int32_t threads) {
  const fdk_unit *unit = unit_of(isa);
  if (int32_t error = refuse(length, unit)) return error;
  int32_t finite = 1;
  share_out(threads, length, GRAIN, [&](int64_t from, int64_t to) {
    if (!unit->finite(x, from, to)) __atomic_store_n(&finite, 0, __ATOMIC_RELAXED);
  });
  return finite;
}

FDK_EXPORT int64_t fdk_wire_bytes(int64_t length, int32_t wire) {
  if (length < 0 || length > LONGEST) return FDK_BAD_LENGTH;
  if (wire < FDK_FLOAT32 || wire > FDK_INT8) return FDK_BAD_WIRE;
  return wire_bytes(length, wire);
}

FDK_EXPORT int32_t fdk_encode(const float *x, int64_t length, int32_t wire, uint8_t *out,
                              int32_t isa, int32_t threads) {
  const fdk_unit *unit = unit_of(isa);
  if (int32_t error = refuse(length, unit)) return error;
  if (wire < FDK_FLOAT32 || wire > FDK_INT8) return FDK_BAD_WIRE;
  const int64_t scales = wire_bytes(length, FDK_INT8) - length;
  share_out(threads, length, GRAIN, [&](int64_t from, int64_t to) {
    if (wire == FDK_FLOAT32)
      memcpy(out + 4 * from, x + from, 4 * (to - from));
    else if (wire == FDK_INT8)
      unit->to_int8(x, out, out + scales, from, to);
    else
      unit->to_halves(x, wire, out, from, to);
  });
  return FDK_OK;
}

FDK_EXPORT int32_t fdk_decode(const uint8_t *data, int64_t length, int32_t wire, float *out,
                              int32_t isa, int32_t threads) {
  const fdk_unit *unit = unit_of(isa);
  if (int32_t error = refuse(length, unit)) return error;
  if (wire < FDK_FLOAT32 || wire > FDK_INT8) return FDK_BAD_WIRE;
  const int64_t scales = wire_bytes(length, FDK_INT8) - length;
  share_out(threads, length, GRAIN, [&](int64_t from, int64_t to) {
    if (wire == FDK_FLOAT32)
      memcpy(out + from, data + 4 * from, 4 * (to - from));
    else if (wire == FDK_INT8)
      unit->from_int8(data, data + scales, out, from, to);
    else
      unit->from_halves(data, wire, out, from, to);
  });
  return FDK_OK;
}
