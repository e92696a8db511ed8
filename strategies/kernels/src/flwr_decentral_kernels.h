/* The C interface of flwr-decentral-kernels: arithmetic of flat float32 vectors, bit for bit as
 * flwr_decentral.ops.reference does it.
 *
 * Vectors are aligned arrays of float. No function keeps a pointer, holds state between calls or
 * takes a lock: calls on different outputs may run at the same time. Inputs are left alone.
 *
 * All pointers must be valid for the lengths that follow from the other arguments; the library
 * cannot check that. It checks every number, and writes nothing when it refuses one.
 *
 * `isa` is one of the instruction sets of fdk_isas(), or 0 for the best of them. `threads` is how
 * many threads may work, the calling one included; the bits do not depend on it, nor on isa.
 *
 * A function returns FDK_OK or one of the errors below, unless it says otherwise.
 */
#ifndef FLWR_DECENTRAL_KERNELS_H
#define FLWR_DECENTRAL_KERNELS_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FDK_ABI 1

enum {
  FDK_OK = 0,
  FDK_BAD_LENGTH = -1,    /* negative, or more than fits */
  FDK_BAD_PARTITION = -2, /* see fdk_fragment */
  FDK_BAD_FRAGMENT = -3,  /* not in [0, fragments) */
  FDK_BAD_COUNT = -4,     /* too few vectors, or an index among them that is out of order */
  FDK_BAD_WIRE = -5,      /* none of the wires below */
  FDK_BAD_ISA = -6,       /* not an instruction set of this build and this machine */
  FDK_NO_MEMORY = -7
};

enum { FDK_FLOAT32 = 0, FDK_BFLOAT16 = 1, FDK_FLOAT16 = 2, FDK_INT8 = 3 };

/* FDK_ABI of the library, which changes whenever a signature or a rule does. */
int32_t fdk_abi(void);

/* The instruction sets that can be used here, one bit each: 1 << 1 is what the compiler takes by
 * default, 1 << 2 and 1 << 3 are x86-64-v2 and x86-64-v3. */
int32_t fdk_isas(void);

/* Partitions by rotation: a vector of `size`, in `fragments` (1 to size) of blocks of `granularity`
 * (a power of two), keyed with `key`. A group, fragments * granularity, has fewer than 2**31
 * coordinates, and there are fewer than 2**32 groups. */

/* Return the length of a fragment, or an error. */
int64_t fdk_fragment(int64_t size, uint32_t fragments, uint32_t granularity, uint64_t key,
                     uint32_t fragment);

/* Copy one fragment out of x. */
int32_t fdk_pack(const float *x, int64_t size, uint32_t fragments, uint32_t granularity,
                 uint64_t key, uint32_t fragment, float *out, int32_t isa, int32_t threads);

/* Copy all fragments out of x; outs[k] is for fragment k. */
int32_t fdk_pack_all(const float *x, int64_t size, uint32_t fragments, uint32_t granularity,
                     uint64_t key, float *const *outs, int32_t isa, int32_t threads);

/* Put all fragments together again. */
int32_t fdk_assemble(const float *const *payloads, int64_t size, uint32_t fragments,
                     uint32_t granularity, uint64_t key, float *out, int32_t isa, int32_t threads);

/* Average x with `count` pieces, piece i being payloads[i] of fragment which[i]: where n >= 1 pieces
 * hold a coordinate, out = (x + first + second + ...) * (1 / (1 + n)); elsewhere out = x. `out` may
 * be x; otherwise it overlaps nothing. */
int32_t fdk_average(const float *x, int64_t size, uint32_t fragments, uint32_t granularity,
                    uint64_t key, int64_t count, const uint32_t *which,
                    const float *const *payloads, float *out, int32_t isa, int32_t threads);

/* out = weights[0] * vectors[0] + weights[1] * vectors[1] + ..., from the first (of at least one) to
 * the last. `out` may be vectors[0]; otherwise it overlaps nothing. */
int32_t fdk_combine(const float *const *vectors, const float *weights, int64_t count,
                    int64_t length, float *out, int32_t isa, int32_t threads);

/* outs[j] = the sum of all vectors but vectors[left_out[j]], from the first to the last. There are
 * at least two vectors, and left_out ascends strictly. */
int32_t fdk_sums_without(const float *const *vectors, int64_t count, const int64_t *left_out,
                         int64_t outputs, int64_t length, float *const *outs, int32_t isa,
                         int32_t threads);

/* out = after where x == before, else x + (after - before). */
int32_t fdk_update(const float *x, const float *before, const float *after, int64_t length,
                   float *out, int32_t isa, int32_t threads);

/* out = x + weight * (theirs - mine). */
int32_t fdk_pairwise(const float *x, const float *mine, const float *theirs, float weight,
                     int64_t length, float *out, int32_t isa, int32_t threads);

/* out_x = x + d and out_y = y - d, with d = share * (y - x). */
int32_t fdk_mix(const float *x, const float *y, float share, int64_t length, float *out_x,
                float *out_y, int32_t isa, int32_t threads);

/* If mixing: mix x and y as fdk_mix does. Then do as fdk_pairwise does to both. */
int32_t fdk_mix_pairwise(const float *x, const float *y, const float *mine, const float *theirs,
                         int32_t mixing, float share, float weight_x, float weight_y,
                         int64_t length, float *out_x, float *out_y, int32_t isa, int32_t threads);

/* If mixing: mix x and y as fdk_mix does. Then do as fdk_update does to both. */
int32_t fdk_mix_update(const float *x, const float *y, const float *before, const float *after,
                       int32_t mixing, float share, int64_t length, float *out_x, float *out_y,
                       int32_t isa, int32_t threads);

/* Return 1 if every value is finite, else 0; or an error. */
int32_t fdk_finite(const float *x, int64_t length, int32_t isa, int32_t threads);

/* Return the bytes that a vector takes on a wire, or an error. */
int64_t fdk_wire_bytes(int64_t length, int32_t wire);

/* Turn a vector into fdk_wire_bytes(length, wire) bytes, and back; bytes may lie at any address. */
int32_t fdk_encode(const float *x, int64_t length, int32_t wire, uint8_t *out, int32_t isa,
                   int32_t threads);
int32_t fdk_decode(const uint8_t *data, int64_t length, int32_t wire, float *out, int32_t isa,
                   int32_t threads);

#ifdef __cplusplus
}
#endif

#endif
