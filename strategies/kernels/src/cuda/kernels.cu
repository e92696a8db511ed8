// CUDA kernels of flwr-decentral's vector arithmetic.
//
// One source for nvcc (built ahead), NVRTC (built at first use) and g++ (tests without a GPU, which
// run it thread by thread). It needs no header of CUDA and none of the standard library.
//
// The bits are those of flwr_decentral/ops/reference.py: every sum is taken in its order, and no
// product is fused with a sum (-fmad=false). NaNs that arithmetic makes may have any NaN's bits;
// what is copied keeps every bit.
//
// A kernel handles its vectors by chunks of four values, 16 bytes, and what is left over, or all of
// it where an address is no multiple of 16, value by value, in the same launch. Inboxes and lists of
// vectors are parameters: nothing has to be uploaded before a launch or kept alive after it. The
// host cuts what is longer than a table into several launches, which go on from the sum so far.

#include "../codecs.h"
#include "../partition.h"

#define FDK_DEVICE __device__ __forceinline__
#define FDK_KERNEL extern "C" __global__ void __launch_bounds__(256)
#define FDK_TABLE const __grid_constant__

namespace {

constexpr int kMostTerms = 320;      // vectors of a combination
constexpr int kMostSummands = 384;   // vectors of sums that leave one out
constexpr int kMostSums = 8;         // such sums
constexpr int kMostFragments = 480;  // fragments that are cut or put together
constexpr int kMostPieces = 384;     // received pieces,
constexpr int kMostAveraged = 128;   // of so many successive fragments

template <class T, int W>
struct alignas(sizeof(T) * W) Chunk {
  T at[W];
};

template <int W, class T>
FDK_DEVICE Chunk<T, W> load(const T *from) {
  return *reinterpret_cast<const Chunk<T, W> *>(from);
}

template <class T, int W>
FDK_DEVICE void store(T *to, const Chunk<T, W> &chunk) {
  *reinterpret_cast<Chunk<T, W> *>(to) = chunk;
}

// What a launch covers: values, the first 4 * chunks of them by fours.
struct Extent {
  int64_t length;
  int64_t chunks;
};

template <int W>
struct Width {
  static constexpr int value = W;
};

FDK_DEVICE int64_t thread() { return (int64_t)blockIdx.x * blockDim.x + threadIdx.x; }
FDK_DEVICE int64_t threads() { return (int64_t)gridDim.x * blockDim.x; }

// Calls body(Width<4>, i) at each chunk and body(Width<1>, i) at each value left over. A thread
// rarely has a second one: unrolling would cost a 64-bit division and bring nothing.
template <class Body>
FDK_DEVICE void each(const Extent &extent, const Body &body) {
#pragma unroll 1
  for (int64_t chunk = thread(); chunk < extent.chunks; chunk += threads())
    body(Width<4>(), 4 * chunk);
#pragma unroll 1
  for (int64_t i = 4 * extent.chunks + thread(); i < extent.length; i += threads())
    body(Width<1>(), i);
}

// fdk_partition for the device: granularity = 1 << shift. Without turns every rotation is zero.
struct Rotation {
  uint32_t fragments;
  uint32_t shift;
  uint32_t low, high;
  uint32_t turns;
};

FDK_DEVICE uint32_t rotation_of(const Rotation &r, uint32_t group) {
  fdk_partition p = {0, r.fragments, 1u << r.shift, r.low, r.high};
  return r.turns ? fdk_rotation(&p, group) : 0u;
}

struct Place {
  uint32_t fragment;
  int64_t offset;  // in the fragment's payload
};

// Where a coordinate lies. A chunk of four never crosses a block's end: chunks are used from a
// granularity of 4 on.
FDK_DEVICE Place place_of(const Rotation &r, int64_t i) {
  uint32_t block = (uint32_t)(i >> r.shift);
  uint32_t group = block / r.fragments, slot = block - group * r.fragments;
  uint32_t rotation = rotation_of(r, group);
  uint32_t fragment = slot >= rotation ? slot - rotation : slot + (r.fragments - rotation);
  int64_t inside = i & (((int64_t)1 << r.shift) - 1);
  return {fragment, ((int64_t)group << r.shift) + inside};
}

// The coordinate of a place: the inverse.
FDK_DEVICE int64_t coordinate_of(const Rotation &r, uint32_t fragment, int64_t offset) {
  uint32_t group = (uint32_t)(offset >> r.shift);
  uint32_t slot = fdk_slot(fragment, rotation_of(r, group), r.fragments);
  int64_t inside = offset & (((int64_t)1 << r.shift) - 1);
  return (((int64_t)group * r.fragments + slot) << r.shift) + inside;
}

FDK_DEVICE float updated(float x, float before, float after) {
  return x == before ? after : x + (after - before);
}

// Moves x and y toward each other.
FDK_DEVICE void flow(float &x, float &y, float share) {
  float step = share * (y - x);
  x = x + step;
  y = y - step;
}

}  // namespace

// --- dense arithmetic -------------------------------------------------------------------------

FDK_KERNEL fdk_update(const float *x, const float *before, const float *after, float *out,
                      Extent extent) {
  each(extent, [&](auto width, int64_t i) {
    constexpr int W = decltype(width)::value;
    Chunk<float, W> a = load<W>(x + i), b = load<W>(before + i), c = load<W>(after + i);
    for (int l = 0; l < W; ++l) a.at[l] = updated(a.at[l], b.at[l], c.at[l]);
    store(out + i, a);
  });
}

struct Terms {
  const float *vector[kMostTerms];
  float weight[kMostTerms];
  uint32_t count;
  uint32_t resumes;  // whether out holds the sum of earlier terms
};

FDK_KERNEL fdk_combine(FDK_TABLE Terms terms, float *out, Extent extent) {
  each(extent, [&](auto width, int64_t i) {
    constexpr int W = decltype(width)::value;
    Chunk<float, W> total;
    uint32_t k = 0;
    if (terms.resumes) {
      total = load<W>(out + i);
    } else {
      total = load<W>(terms.vector[0] + i);
      for (int l = 0; l < W; ++l) total.at[l] *= terms.weight[0];
      k = 1;
    }
#pragma unroll 4
    for (; k < terms.count; ++k) {
      Chunk<float, W> v = load<W>(terms.vector[k] + i);
      for (int l = 0; l < W; ++l) total.at[l] = total.at[l] + v.at[l] * terms.weight[k];
    }
    store(out + i, total);
  });
}

FDK_KERNEL fdk_pairwise(const float *x, const float *mine, const float *theirs, float weight,
                        float *out, Extent extent) {
  each(extent, [&](auto width, int64_t i) {
    constexpr int W = decltype(width)::value;
    Chunk<float, W> a = load<W>(x + i), b = load<W>(mine + i), c = load<W>(theirs + i);
    for (int l = 0; l < W; ++l) a.at[l] = a.at[l] + weight * (c.at[l] - b.at[l]);
    store(out + i, a);
  });
}

FDK_KERNEL fdk_mix(const float *x, const float *y, float share, float *out_x, float *out_y,
                   Extent extent) {
  each(extent, [&](auto width, int64_t i) {
    constexpr int W = decltype(width)::value;
    Chunk<float, W> a = load<W>(x + i), b = load<W>(y + i);
    for (int l = 0; l < W; ++l) flow(a.at[l], b.at[l], share);
    store(out_x + i, a);
    store(out_y + i, b);
  });
}

FDK_KERNEL fdk_mix_pairwise(const float *x, const float *y, const float *mine, const float *theirs,
                            uint32_t flows, float share, float weight_x, float weight_y,
                            float *out_x, float *out_y, Extent extent) {
  each(extent, [&](auto width, int64_t i) {
    constexpr int W = decltype(width)::value;
    Chunk<float, W> a = load<W>(x + i), b = load<W>(y + i);
    Chunk<float, W> c = load<W>(mine + i), d = load<W>(theirs + i);
    for (int l = 0; l < W; ++l) {
      float apart = d.at[l] - c.at[l];
      if (flows) flow(a.at[l], b.at[l], share);
      a.at[l] = a.at[l] + weight_x * apart;
      b.at[l] = b.at[l] + weight_y * apart;
    }
    store(out_x + i, a);
    store(out_y + i, b);
  });
}

FDK_KERNEL fdk_mix_update(const float *x, const float *y, const float *before, const float *after,
                          uint32_t flows, float share, float *out_x, float *out_y,
                          Extent extent) {
  each(extent, [&](auto width, int64_t i) {
    constexpr int W = decltype(width)::value;
    Chunk<float, W> a = load<W>(x + i), b = load<W>(y + i);
    Chunk<float, W> c = load<W>(before + i), d = load<W>(after + i);
    for (int l = 0; l < W; ++l) {
      if (flows) flow(a.at[l], b.at[l], share);
      a.at[l] = updated(a.at[l], c.at[l], d.at[l]);
      b.at[l] = updated(b.at[l], c.at[l], d.at[l]);
    }
    store(out_x + i, a);
    store(out_y + i, b);
  });
}

struct Summands {
  const float *vector[kMostSummands];
  float *out[kMostSums];
  uint32_t left_out[kMostSums];
  uint32_t count;  // vectors here,
  uint32_t first;  // of which this is the number of the first
  uint32_t sums;
};

// All sums in one pass over the vectors, each from the first vector that it holds to the last.
FDK_KERNEL fdk_sums_without(FDK_TABLE Summands s, Extent extent) {
  each(extent, [&](auto width, int64_t i) {
    constexpr int W = decltype(width)::value;
    Chunk<float, W> sum[kMostSums] = {};
#pragma unroll
    for (uint32_t m = 0; m < kMostSums; ++m)
      if (m < s.sums && s.first) sum[m] = load<W>(s.out[m] + i);
#pragma unroll 2
    for (uint32_t k = 0; k < s.count; ++k) {
      Chunk<float, W> v = load<W>(s.vector[k] + i);
      uint32_t number = s.first + k;
#pragma unroll
      for (uint32_t m = 0; m < kMostSums; ++m) {
        if (m >= s.sums || number == s.left_out[m]) continue;
        // Not 0 + v: that would turn -0 into +0.
        bool begins = number == (s.left_out[m] == 0 ? 1u : 0u);
        for (int l = 0; l < W; ++l) sum[m].at[l] = begins ? v.at[l] : sum[m].at[l] + v.at[l];
      }
    }
#pragma unroll
    for (uint32_t m = 0; m < kMostSums; ++m)
      if (m < s.sums) store(s.out[m] + i, sum[m]);
  });
}

// broken must be zero before; every thread that finds something writes the same.
FDK_KERNEL fdk_finite(const float *x, uint32_t *broken, Extent extent) {
  each(extent, [&](auto width, int64_t i) {
    constexpr int W = decltype(width)::value;
    Chunk<float, W> a = load<W>(x + i);
    bool found = false;
    for (int l = 0; l < W; ++l) found |= (fdk_bits(a.at[l]) & 0x7f800000u) == 0x7f800000u;
    if (found) *broken = 1;
  });
}

// --- fragments --------------------------------------------------------------------------------

// extent is that of the payload.
FDK_KERNEL fdk_pack(const float *x, Rotation rotation, uint32_t fragment, float *out,
                    Extent extent) {
  each(extent, [&](auto width, int64_t i) {
    constexpr int W = decltype(width)::value;
    store(out + i, load<W>(x + coordinate_of(rotation, fragment, i)));
  });
}

struct Payloads {
  float *of[kMostFragments];
  uint32_t first;  // the fragment of the first payload
  uint32_t count;
};

FDK_KERNEL fdk_pack_all(const float *x, Rotation rotation, FDK_TABLE Payloads payloads,
                        Extent extent) {
  each(extent, [&](auto width, int64_t i) {
    constexpr int W = decltype(width)::value;
    Place place = place_of(rotation, i);
    uint32_t at = place.fragment - payloads.first;
    if (at < payloads.count) store(payloads.of[at] + place.offset, load<W>(x + i));
  });
}

FDK_KERNEL fdk_assemble(FDK_TABLE Payloads payloads, Rotation rotation, float *out,
                        Extent extent) {
  each(extent, [&](auto width, int64_t i) {
    constexpr int W = decltype(width)::value;
    Place place = place_of(rotation, i);
    uint32_t at = place.fragment - payloads.first;
    if (at < payloads.count) store(out + i, load<W>(payloads.of[at] + place.offset));
  });
}

struct Inbox {
  const float *piece[kMostPieces];      // by fragment, those of one in their order
  float factor[kMostAveraged];          // 1 / (1 + count), or 1 while pieces are still to come
  uint16_t begin[kMostAveraged + 1];    // the pieces of the j-th fragment: from begin[j] on
  uint32_t first;                       // the fragment that begin[0] is of
  uint32_t fragments;
};

// In place, coordinates that no piece holds are not even read.
FDK_KERNEL fdk_average(const float *x, FDK_TABLE Inbox inbox, Rotation rotation, float *out,
                       Extent extent) {
  each(extent, [&](auto width, int64_t i) {
    constexpr int W = decltype(width)::value;
    Place place = place_of(rotation, i);
    uint32_t at = place.fragment - inbox.first;
    bool held = at < inbox.fragments;
    uint32_t piece = held ? inbox.begin[at] : 0, end = held ? inbox.begin[at + 1] : 0;
    if (piece == end) {
      if (out != x) store(out + i, load<W>(x + i));
      return;
    }
    Chunk<float, W> total = load<W>(x + i);
#pragma unroll 4
    for (; piece < end; ++piece) {
      Chunk<float, W> v = load<W>(inbox.piece[piece] + place.offset);
      for (int l = 0; l < W; ++l) total.at[l] = total.at[l] + v.at[l];
    }
    for (int l = 0; l < W; ++l) total.at[l] *= inbox.factor[at];
    store(out + i, total);
  });
}

// --- wire codecs ------------------------------------------------------------------------------

FDK_KERNEL fdk_encode_bfloat16(const float *x, uint16_t *out, Extent extent) {
  each(extent, [&](auto width, int64_t i) {
    constexpr int W = decltype(width)::value;
    Chunk<float, W> a = load<W>(x + i);
    Chunk<uint16_t, W> half;
    for (int l = 0; l < W; ++l) half.at[l] = fdk_bfloat16(fdk_bits(a.at[l]));
    store(out + i, half);
  });
}

FDK_KERNEL fdk_decode_bfloat16(const uint16_t *data, float *out, Extent extent) {
  each(extent, [&](auto width, int64_t i) {
    constexpr int W = decltype(width)::value;
    Chunk<uint16_t, W> half = load<W>(data + i);
    Chunk<float, W> a;
    for (int l = 0; l < W; ++l) a.at[l] = fdk_value(fdk_from_bfloat16(half.at[l]));
    store(out + i, a);
  });
}

FDK_KERNEL fdk_encode_float16(const float *x, uint16_t *out, Extent extent) {
  each(extent, [&](auto width, int64_t i) {
    constexpr int W = decltype(width)::value;
    Chunk<float, W> a = load<W>(x + i);
    Chunk<uint16_t, W> half;
    for (int l = 0; l < W; ++l) half.at[l] = fdk_float16(fdk_bits(a.at[l]));
    store(out + i, half);
  });
}

FDK_KERNEL fdk_decode_float16(const uint16_t *data, float *out, Extent extent) {
  each(extent, [&](auto width, int64_t i) {
    constexpr int W = decltype(width)::value;
    Chunk<uint16_t, W> half = load<W>(data + i);
    Chunk<float, W> a;
    for (int l = 0; l < W; ++l) a.at[l] = fdk_value(fdk_from_float16(half.at[l]));
    store(out + i, a);
  });
}

// A warp takes a block: each lane four of the first 128 values, and four of the others.
FDK_KERNEL fdk_encode_int8(const float *x, float *scales, int8_t *codes, Extent extent) {
  constexpr int kQuads = FDK_BLOCK / 128;
  int64_t blocks = (extent.length + FDK_BLOCK - 1) / FDK_BLOCK;
  int64_t lane = threadIdx.x % 32;
#pragma unroll 1
  for (int64_t block = thread() / 32; block < blocks; block += threads() / 32) {
    Chunk<float, 4> value[kQuads] = {};
    uint32_t peak = 0;
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      int64_t i = block * FDK_BLOCK + 128 * q + 4 * lane;
      if (i < 4 * extent.chunks) {
        value[q] = load<4>(x + i);
      } else {
        for (int l = 0; l < 4; ++l)
          if (i + l < extent.length) value[q].at[l] = x[i + l];
      }
      // The bits of magnitudes are ordered as the magnitudes are, infinity and NaN above all.
      for (int l = 0; l < 4; ++l) {
        uint32_t magnitude = fdk_bits(value[q].at[l]) & 0x7fffffffu;
        peak = magnitude > peak ? magnitude : peak;
      }
    }
    peak = __reduce_max_sync(0xffffffffu, peak);
    float scale = fdk_scale(peak);
    if (lane == 0) scales[block] = scale;
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      int64_t i = block * FDK_BLOCK + 128 * q + 4 * lane;
      Chunk<int8_t, 4> code;
      // False for NaN as well.
      for (int l = 0; l < 4; ++l)
        code.at[l] = scale > 0.0f ? fdk_int8(value[q].at[l], scale) : (int8_t)0;
      if (i + 4 <= extent.length) {
        store(codes + i, code);
      } else {
        for (int l = 0; l < 4; ++l)
          if (i + l < extent.length) codes[i + l] = code.at[l];
      }
    }
  }
}

FDK_KERNEL fdk_decode_int8(const float *scales, const int8_t *codes, float *out, Extent extent) {
  each(extent, [&](auto width, int64_t i) {
    constexpr int W = decltype(width)::value;
    Chunk<int8_t, W> code = load<W>(codes + i);
    float scale = scales[i / FDK_BLOCK];
    Chunk<float, W> a;
    for (int l = 0; l < W; ++l) a.at[l] = (float)code.at[l] * scale;
    store(out + i, a);
  });
}
