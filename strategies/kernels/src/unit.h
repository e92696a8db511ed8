// What one instruction set offers: a table of functions, each on a range of groups or coordinates.
#pragma once

#include "partition.h"

// The pieces of an inbox by fragment: those of k are payloads[first[k]] up to payloads[first[k + 1]].
struct fdk_inbox {
  const int64_t *first;
  const float *const *payloads;
};

struct fdk_unit {
  // On whole groups, from one to another.
  void (*pack)(const fdk_partition &, const float *x, uint32_t fragment, float *out, int64_t from,
               int64_t to);
  void (*pack_all)(const fdk_partition &, const float *x, float *const *outs, int64_t from,
                   int64_t to);
  void (*assemble)(const fdk_partition &, const float *const *payloads, float *out, int64_t from,
                   int64_t to);
  void (*average)(const fdk_partition &, const float *x, const fdk_inbox &, float *out,
                  int64_t from, int64_t to);
  // On coordinates, from one to another.
  void (*combine)(const float *const *vectors, const float *weights, int64_t count, float *out,
                  int64_t from, int64_t to);
  void (*sums_without)(const float *const *vectors, int64_t count, const int64_t *left_out,
                       int64_t outputs, float *const *outs, int64_t from, int64_t to);
  void (*update)(const float *x, const float *before, const float *after, float *out, int64_t from,
                 int64_t to);
  void (*pairwise)(const float *x, const float *mine, const float *theirs, float weight, float *out,
                   int64_t from, int64_t to);
  void (*mix)(const float *x, const float *y, float share, float *out_x, float *out_y, int64_t from,
              int64_t to);
  void (*mix_pairwise)(const float *x, const float *y, const float *mine, const float *theirs,
                       bool mixing, float share, float weight_x, float weight_y, float *out_x,
                       float *out_y, int64_t from, int64_t to);
  void (*mix_update)(const float *x, const float *y, const float *before, const float *after,
                     bool mixing, float share, float *out_x, float *out_y, int64_t from,
                     int64_t to);
  bool (*finite)(const float *x, int64_t from, int64_t to);
  // On coordinates, `from` being a multiple of FDK_BLOCK; int8 scales and codes lie apart.
  void (*to_halves)(const float *x, int wire, uint8_t *out, int64_t from, int64_t to);
  void (*from_halves)(const uint8_t *data, int wire, float *out, int64_t from, int64_t to);
  void (*to_int8)(const float *x, uint8_t *scales, uint8_t *codes, int64_t from, int64_t to);
  void (*from_int8)(const uint8_t *scales, const uint8_t *codes, float *out, int64_t from,
                    int64_t to);
};

// Defined by the source of each unit; which of them are built decides CMakeLists.txt.
extern const fdk_unit fdk_unit_base;
extern const fdk_unit fdk_unit_v2;
extern const fdk_unit fdk_unit_v3;
