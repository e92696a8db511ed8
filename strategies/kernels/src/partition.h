/* Where the coordinates of a rotation partition lie: one file for C++, CUDA and NVRTC.
 *
 * The vector is cut into blocks of g coordinates, and F consecutive blocks form a group. Block j of
 * group q belongs to fragment k exactly when j == (k + rot(q)) mod F, rot being a keyed hash of q.
 * Element t of the block that fragment k owns in group q lies at payload[q * g + t]. The last group
 * may be cut short, and the rule holds for what is left of it.
 *
 * flwr_decentral.core.fragments says the same in Python.
 */
#ifndef FDK_PARTITION_H
#define FDK_PARTITION_H

#ifdef __CUDACC_RTC__
/* NVRTC has no headers. */
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
#else
#include <stdint.h>
#endif

/* Inlined everywhere: an out-of-line copy that one instruction set compiled could be linked into
 * another one's code. */
#ifdef __CUDACC__
#define FDK_FN static __host__ __device__ __forceinline__
#else
#define FDK_FN static inline __attribute__((always_inline, unused))
#endif

struct fdk_partition {
  int64_t size;         /* coordinates, D */
  uint32_t fragments;   /* F, at least 1 */
  uint32_t granularity; /* g, a power of two */
  uint32_t low, high;   /* the halves of the key */
};

FDK_FN uint32_t fdk_hash(uint32_t q, uint32_t low, uint32_t high) {
  uint32_t h = q + low;
  h ^= h >> 17;
  h *= 0xed5ad4bbu;
  h ^= h >> 11;
  h ^= high;
  h *= 0xac4c1b51u;
  h ^= h >> 15;
  h *= 0x31848babu;
  h ^= h >> 14;
  return h;
}

/* rot(q), in [0, F) */
FDK_FN uint32_t fdk_rotation(const struct fdk_partition *p, uint32_t q) {
  return (uint32_t)(((uint64_t)fdk_hash(q, p->low, p->high) * p->fragments) >> 32);
}

/* (fragment + rotation) mod F, both below F < 2**31: the place of a fragment's block in its group */
FDK_FN uint32_t fdk_slot(uint32_t fragment, uint32_t rotation, uint32_t fragments) {
  uint32_t slot = fragment + rotation;
  return slot >= fragments ? slot - fragments : slot;
}

/* Groups of which every coordinate exists. */
FDK_FN int64_t fdk_whole_groups(const struct fdk_partition *p) {
  return p->size / ((int64_t)p->fragments * p->granularity);
}

/* Coordinates that a fragment has in the group after the whole ones; *start is where they lie. */
FDK_FN int64_t fdk_tail(const struct fdk_partition *p, uint32_t fragment, int64_t *start) {
  int64_t whole = fdk_whole_groups(p);
  int64_t group = (int64_t)p->fragments * p->granularity;
  uint32_t slot = fdk_slot(fragment, fdk_rotation(p, (uint32_t)whole), p->fragments);
  int64_t rest;
  *start = whole * group + (int64_t)slot * p->granularity;
  rest = p->size - *start;
  if (rest < 0) rest = 0;
  return rest < (int64_t)p->granularity ? rest : (int64_t)p->granularity;
}

/* Coordinates of a fragment. */
FDK_FN int64_t fdk_fragment_length(const struct fdk_partition *p, uint32_t fragment) {
  int64_t start;
  return fdk_whole_groups(p) * p->granularity + fdk_tail(p, fragment, &start);
}

#endif
