// Random calls of the C interface, compared with loops over single coordinates.
//
// Every call is made of a few bytes, which libFuzzer chooses, or this file itself: it keeps inputs that
// lead the library along new ways, and changes them. Some of them ask for what is refused; then
// nothing may have been written. Buffers are of exactly the length that is due, so that the address
// sanitizer sees whatever goes beyond them.
//
//     cmake --preset address && cmake --build --preset address
//     build/address/fdk_fuzz 1000000
//
// prints how many calls were made of each function, and stops at the first that goes wrong. A second
// argument is the seed. With clang and its runtime library there is libFuzzer, too:
//
//     cmake --preset fuzzer && cmake --build --preset fuzzer
//     build/fuzzer/fdk_fuzz -runs=1000000 -max_len=64 -len_control=0

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <initializer_list>
#include <vector>

#include "../src/codecs.h"
#include "../src/flwr_decentral_kernels.h"

namespace {

uint64_t calls[16], refusals;

[[noreturn]] void fail(const char *what, int line) {
  fprintf(stderr, "tests/fuzz.cpp:%d: %s\n", line, what);
  abort();
}
#define EXPECT(condition) ((condition) ? void() : fail(#condition, __LINE__))

// A generator of numbers: splitmix64.
struct Random {
  uint64_t state;
  uint64_t next() {
    uint64_t z = (state += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }
  uint64_t below(uint64_t end) { return next() % end; }
};

// What a call is made of.
struct Choices {
  const uint8_t *bytes;
  size_t left;
  uint8_t byte() {
    if (!left) return 0;
    left--;
    return *bytes++;
  }
  uint32_t below(uint32_t end) { return (byte() << 8 | byte()) % end; }
  bool rarely() { return byte() >= 250; }  // nor where no bytes are left
};

// Memory of exactly `size` bytes, which begins so many bytes after the start of a cache line.
struct Memory {
  uint8_t *whole, *data;
  size_t size;
  Memory(size_t size, size_t offset) : whole(line(size + offset)), data(whole + offset), size(size) {
    memset(whole, 0xa5, size + offset);
  }
  static uint8_t *line(size_t size) {
    void *memory = nullptr;
    if (posix_memalign(&memory, 64, size)) abort();
    return static_cast<uint8_t *>(memory);
  }
  Memory(Memory &&other) : whole(other.whole), data(other.data), size(other.size) {
    other.whole = nullptr;
  }
  Memory(const Memory &) = delete;
  ~Memory() { free(whole); }
  bool untouched() const {
    for (size_t i = 0; i < size; i++)
      if (data[i] != 0xa5) return false;
    return true;
  }
};

struct Vector : Memory {
  int64_t length;
  Vector(int64_t length, size_t offset) : Memory(4 * length, 4 * offset), length(length) {}
  float *values() const { return reinterpret_cast<float *>(data); }
  float &operator[](int64_t i) const { return values()[i]; }
};

Vector filled(int64_t length, Random &random) {
  Vector vector(length, random.below(4));
  const int kind = (int)random.below(8);
  for (int64_t i = 0; i < length; i++) {
    uint32_t bits = (uint32_t)random.next();
    // Mostly values of about one, which are added without losing all of the smaller.
    if (kind || random.below(4)) bits = (bits & 0x81ffffffu) | 0x3e000000u;
    vector[i] = fdk_value(bits);
  }
  return vector;
}

std::vector<Vector> several(int64_t count, int64_t length, Random &random) {
  std::vector<Vector> vectors;
  for (int64_t i = 0; i < count; i++) vectors.push_back(filled(length, random));
  return vectors;
}

std::vector<float *> pointers(const std::vector<Vector> &vectors) {
  std::vector<float *> result;
  for (const Vector &vector : vectors) result.push_back(vector.values());
  return result;
}

bool same(float a, float b) { return fdk_bits(a) == fdk_bits(b) || (a != a && b != b); }

struct Call {
  Choices choose;
  Random random;
  int32_t isa, threads;
  int64_t size;
  uint32_t fragments, granularity;
  uint64_t key;
  bool bad = false;  // whether something was asked for that must be refused

  explicit Call(Choices choices) : choose(choices) {
    random.state = (uint64_t)choose.below(65536) << 16 | choose.below(65536);
    const int32_t usable = fdk_isas();
    do isa = (int32_t)random.below(4);
    while (isa && !(usable >> isa & 1));
    // Threads take far longer to start than such a call takes.
    threads = choose.byte() >= 254 ? 2 + (int32_t)random.below(3) : 1;
    granularity = 1u << choose.below(choose.rarely() ? 11 : 6);
    fragments = 1 + choose.below(choose.rarely() ? 100 : 12);
    const int64_t group = (int64_t)granularity * fragments;
    const int64_t edges[] = {0, 1, granularity, group - 1, group, group + 1, 3 * group + 1};
    size = choose.below(3) ? choose.below(400) : edges[choose.below(7)];
    if (size > 4000) size %= 4000;
    if (threads > 1) size += 9000;
    if ((int64_t)fragments > size) fragments = size ? (uint32_t)size : 1;
    key = random.next();
    if (choose.rarely()) spoil();
  }

  void spoil() {
    bad = true;
    switch (choose.below(5)) {
      case 0: granularity = granularity > 1 ? granularity + 1 : 0; break;
      case 1: fragments = choose.below(2) ? 0 : (uint32_t)size + 2; break;
      case 2: size = -1 - (int64_t)choose.below(100); break;
      case 3: isa = choose.below(2) ? 4 : -1; break;
      default: granularity = 1u << 31, fragments = 1; break;
    }
  }

  // Which fragment every coordinate belongs to, found the long way.
  std::vector<uint32_t> owners() const {
    const fdk_partition p = {size, fragments, granularity, (uint32_t)key, (uint32_t)(key >> 32)};
    std::vector<uint32_t> owner(size);
    for (int64_t i = 0; i < size; i++) {
      const int64_t block = i / granularity, q = block / fragments;
      const uint64_t rotation = (uint64_t)fdk_hash((uint32_t)q, p.low, p.high) * fragments >> 32;
      owner[i] = (uint32_t)((block % fragments + fragments - rotation) % fragments);
    }
    return owner;
  }

  std::vector<int64_t> lengths(const std::vector<uint32_t> &owner) const {
    std::vector<int64_t> length(fragments);
    for (uint32_t k : owner) length[k]++;
    for (uint32_t k = 0; k < fragments; k++)
      EXPECT(fdk_fragment(size, fragments, granularity, key, k) == length[k]);
    EXPECT(fdk_fragment(size, fragments, granularity, key, fragments) == FDK_BAD_FRAGMENT);
    return length;
  }

  void refused(int64_t answer, std::initializer_list<const Memory *> outs) {
    EXPECT(answer < 0);
    for (const Memory *out : outs) EXPECT(out->untouched());
    refusals++;
  }

  void pack() {
    if (bad) {
      Vector out(700, 0);
      float *outs[] = {out.values()};
      refused(fdk_pack(out.values(), size, fragments, granularity, key, 0, out.values(), isa, 1),
              {&out});
      refused(fdk_pack_all(out.values(), size, fragments, granularity, key, outs, isa, 1), {&out});
      refused(fdk_assemble(outs, size, fragments, granularity, key, out.values(), isa, 1), {&out});
      return;
    }
    const std::vector<uint32_t> owner = owners();
    const std::vector<int64_t> length = lengths(owner);
    const Vector x = filled(size, random);
    std::vector<Vector> outs;
    // Where all begin with a cache line, what is large is written past the caches.
    const uint64_t offsets = random.below(2) ? 4 : 1;
    for (int64_t each : length) outs.emplace_back(each, random.below(offsets));
    const std::vector<float *> table = pointers(outs);
    EXPECT(!fdk_pack_all(x.values(), size, fragments, granularity, key, table.data(), isa, threads));
    std::vector<int64_t> next(fragments);
    for (int64_t i = 0; i < size; i++) {
      const int64_t t = next[owner[i]]++;
      EXPECT(fdk_bits(outs[owner[i]][t]) == fdk_bits(x[i]));
    }
    const uint32_t k = (uint32_t)random.below(fragments);
    const Vector one(length[k], random.below(4));
    EXPECT(!fdk_pack(x.values(), size, fragments, granularity, key, k, one.values(), isa, threads));
    EXPECT(!memcmp(one.data, outs[k].data, one.size));
    const Vector again(size, random.below(offsets));
    EXPECT(!fdk_assemble(table.data(), size, fragments, granularity, key, again.values(), isa,
                         threads));
    EXPECT(!memcmp(again.data, x.data, x.size));
    const Vector nothing(length[k], 0);
    refused(fdk_pack(x.values(), size, fragments, granularity, key, fragments, nothing.values(),
                     isa, threads),
            {&nothing});
  }

  void average() {
    if (bad) {
      Vector out(700, 0);
      refused(fdk_average(out.values(), size, fragments, granularity, key, 0, nullptr, nullptr,
                          out.values(), isa, 1),
              {&out});
      return;
    }
    const std::vector<uint32_t> owner = owners();
    const std::vector<int64_t> length = lengths(owner);
    const Vector x = filled(size, random);
    std::vector<uint32_t> which;
    std::vector<Vector> pieces;
    for (int64_t count = choose.below(24); count > 0; count--) {
      which.push_back((uint32_t)random.below(fragments));
      pieces.push_back(filled(length[which.back()], random));
    }
    std::vector<float> expected(size);
    std::vector<int64_t> next(fragments);
    for (int64_t i = 0; i < size; i++) {
      const int64_t t = next[owner[i]]++;
      float sum = x[i], count = 1;
      for (size_t piece = 0; piece < pieces.size(); piece++) {
        if (which[piece] != owner[i]) continue;
        sum += pieces[piece][t];
        count++;
      }
      expected[i] = count > 1 ? sum * (1.0f / count) : sum;
    }
    const std::vector<float *> table = pointers(pieces);
    const Vector apart(size, random.below(4));
    const bool in_place = choose.below(2);
    const Vector &out = in_place ? x : apart;
    if (!in_place && !which.empty()) {
      std::vector<uint32_t> broken = which;
      broken[random.below(broken.size())] = fragments + (uint32_t)random.below(5);
      refused(fdk_average(x.values(), size, fragments, granularity, key, broken.size(),
                          broken.data(), table.data(), out.values(), isa, threads),
              {&apart});
    }
    EXPECT(!fdk_average(x.values(), size, fragments, granularity, key, which.size(), which.data(),
                        table.data(), out.values(), isa, threads));
    for (int64_t i = 0; i < size; i++) EXPECT(same(out[i], expected[i]));
  }

  void combine() {
    const int64_t count = 1 + choose.below(9);
    const std::vector<Vector> vectors = several(count, bad ? 0 : size, random);
    const std::vector<float *> table = pointers(vectors);
    std::vector<float> weights;
    for (int64_t k = 0; k < count; k++) weights.push_back((float)(int)random.below(7) / 3 - 1);
    const Vector apart(bad ? 0 : size, random.below(4));
    if (bad && (size < 0 || isa < 0 || isa > 3)) {
      refused(fdk_combine(table.data(), weights.data(), count, size, apart.values(), isa, 1), {});
      return;
    }
    if (bad) return;
    refused(fdk_combine(table.data(), weights.data(), 0, size, apart.values(), isa, threads),
            {&apart});
    std::vector<float> expected(size);
    for (int64_t i = 0; i < size; i++) {
      expected[i] = vectors[0][i] * weights[0];
      for (int64_t k = 1; k < count; k++) expected[i] += vectors[k][i] * weights[k];
    }
    const Vector &out = choose.below(2) ? vectors[0] : apart;
    EXPECT(!fdk_combine(table.data(), weights.data(), count, size, out.values(), isa, threads));
    for (int64_t i = 0; i < size; i++) EXPECT(same(out[i], expected[i]));
  }

  void sums_without() {
    if (bad) return;
    const int64_t count = 2 + choose.below(8);
    const std::vector<Vector> vectors = several(count, size, random);
    std::vector<int64_t> left_out;
    for (int64_t k = 0; k < count; k++)
      if (random.below(2)) left_out.push_back(k);
    std::vector<Vector> outs;
    for (size_t j = 0; j < left_out.size(); j++) outs.emplace_back(size, random.below(4));
    const std::vector<float *> table = pointers(vectors), targets = pointers(outs);
    if (left_out.size() > 1) {
      std::vector<int64_t> broken = left_out;
      broken[1] = broken[0];
      refused(fdk_sums_without(table.data(), count, broken.data(), broken.size(), size,
                               targets.data(), isa, threads),
              {&outs[0], &outs[1]});
    }
    EXPECT(!fdk_sums_without(table.data(), count, left_out.data(), left_out.size(), size,
                             targets.data(), isa, threads));
    for (size_t j = 0; j < left_out.size(); j++) {
      const int64_t first = left_out[j] ? 0 : 1;
      for (int64_t i = 0; i < size; i++) {
        float sum = vectors[first][i];
        for (int64_t k = first + 1; k < count; k++)
          if (k != left_out[j]) sum += vectors[k][i];
        EXPECT(same(outs[j][i], sum));
      }
    }
  }

  static float updated(float x, float before, float after) {
    return x == before ? after : x + (after - before);
  }

  void two_vectors() {
    if (bad) return;
    const std::vector<Vector> v = several(4, size, random);
    const Vector &x = v[0], &y = v[1], &a = v[2], &b = v[3];
    for (int64_t i = 0; i < size; i += 3) a[i] = x[i];
    const Vector one(size, random.below(4)), other(size, random.below(4));
    const float share = (float)(int)random.below(9) / 8, w = (float)(int)random.below(9) / 4 - 1;
    const bool mixing = random.below(2);
    switch (choose.below(5)) {
      case 0:
        EXPECT(!fdk_update(x.values(), a.values(), b.values(), size, one.values(), isa, threads));
        for (int64_t i = 0; i < size; i++) EXPECT(same(one[i], updated(x[i], a[i], b[i])));
        return;
      case 1:
        EXPECT(!fdk_pairwise(x.values(), a.values(), b.values(), w, size, one.values(), isa,
                             threads));
        for (int64_t i = 0; i < size; i++) EXPECT(same(one[i], x[i] + w * (b[i] - a[i])));
        return;
      case 2:
        EXPECT(!fdk_mix(x.values(), y.values(), share, size, one.values(), other.values(), isa,
                        threads));
        for (int64_t i = 0; i < size; i++) {
          const float step = share * (y[i] - x[i]);
          EXPECT(same(one[i], x[i] + step) && same(other[i], y[i] - step));
        }
        return;
      case 3:
        EXPECT(!fdk_mix_pairwise(x.values(), y.values(), a.values(), b.values(), mixing, share, w,
                                 share, size, one.values(), other.values(), isa, threads));
        break;
      default:
        EXPECT(!fdk_mix_update(x.values(), y.values(), a.values(), b.values(), mixing, share, size,
                               one.values(), other.values(), isa, threads));
        for (int64_t i = 0; i < size; i++) {
          const float step = share * (y[i] - x[i]);
          const float p = mixing ? x[i] + step : x[i], q = mixing ? y[i] - step : y[i];
          EXPECT(same(one[i], updated(p, a[i], b[i])) && same(other[i], updated(q, a[i], b[i])));
        }
        return;
    }
    for (int64_t i = 0; i < size; i++) {
      const float step = share * (y[i] - x[i]);
      const float p = mixing ? x[i] + step : x[i], q = mixing ? y[i] - step : y[i];
      EXPECT(same(one[i], p + w * (b[i] - a[i])) && same(other[i], q + share * (b[i] - a[i])));
    }
  }

  void finite() {
    if (bad) return;
    const Vector x = filled(size, random);
    for (int64_t i = 0; i < size; i++)
      if ((fdk_bits(x[i]) & 0x7f800000u) == 0x7f800000u) x[i] = 1;
    EXPECT(fdk_finite(x.values(), size, isa, threads) == 1);
    if (!size) return;
    x[random.below(size)] = fdk_value(0x7f800000u | (uint32_t)random.below(2) << random.below(32));
    EXPECT(fdk_finite(x.values(), size, isa, threads) == 0);
  }

  void wire() {
    const int32_t wire = (int32_t)choose.below(4);
    if (bad) {
      Vector out(4, 0);
      EXPECT(fdk_wire_bytes(size, 4) < 0 && fdk_wire_bytes(-1, wire) == FDK_BAD_LENGTH);
      refused(fdk_encode(out.values(), 1, 4 + wire, out.data, 0, 1), {&out});
      refused(fdk_decode(out.data, 1, -1 - wire, out.values(), 0, 1), {&out});
      return;
    }
    const Vector x = filled(size, random);
    const int64_t bytes = fdk_wire_bytes(size, wire);
    const Memory data(bytes, random.below(4));
    const Vector back(size, random.below(4));
    EXPECT(!fdk_encode(x.values(), size, wire, data.data, isa, threads));
    EXPECT(!fdk_decode(data.data, size, wire, back.values(), isa, threads));
    for (int64_t i = 0; i < size; i++) {
      float expected = x[i];
      if (wire == FDK_BFLOAT16)
        expected = fdk_value(fdk_from_bfloat16(fdk_bfloat16(fdk_bits(x[i]))));
      else if (wire == FDK_FLOAT16)
        expected = fdk_value(fdk_from_float16(fdk_float16(fdk_bits(x[i]))));
      else if (wire == FDK_INT8) {
        uint32_t peak = 0;
        for (int64_t t = i / FDK_BLOCK * FDK_BLOCK; t < size && t < (i / FDK_BLOCK + 1) * FDK_BLOCK;
             t++) {
          const uint32_t magnitude = fdk_bits(x[t]) & 0x7fffffffu;
          peak = magnitude > peak ? magnitude : peak;
        }
        const float scale = fdk_scale(peak);
        expected = scale > 0 ? (float)fdk_int8(x[i], scale) * scale : scale;
      }
      EXPECT(same(back[i], expected));
    }
    const Memory noise(bytes, random.below(4));
    for (int64_t i = 0; i < bytes; i++) noise.data[i] = (uint8_t)random.next();
    EXPECT(!fdk_decode(noise.data, size, wire, back.values(), isa, threads));
  }

  void run() {
    const uint32_t which = choose.below(8);
    calls[which]++;
    switch (which) {
      case 0: return pack();
      case 1: return average();
      case 2: return combine();
      case 3: return sums_without();
      case 4: return two_vectors();
      case 5: return finite();
      case 6: return wire();
      default: return average();
    }
  }
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
  Call({bytes, size}).run();
  return 0;
}

#ifndef FDK_LIBFUZZER

namespace {

enum { WAYS = 1 << 16 };

// Steps from one place of the library to another that were seen, by a hash of the two.
uint8_t seen[WAYS];
uint64_t ways;

struct Input {
  uint8_t bytes[64];
};

// Change a few bytes of an input that was kept, at times to those of another one.
Input changed(const std::vector<Input> &kept, Random &random) {
  Input input = kept[random.below(kept.size())];
  const Input &other = kept[random.below(kept.size())];
  for (uint64_t times = 1 + random.below(4); times; times--) {
    const uint64_t place = random.below(sizeof input.bytes);
    switch (random.below(4)) {
      case 0: input.bytes[place] = other.bytes[place]; break;
      case 1: input.bytes[place] += random.below(2) ? 1 : -1; break;
      default: input.bytes[place] = (uint8_t)random.next(); break;
    }
  }
  return input;
}

}  // namespace

// Called by the library, in the threads of a call as well.
extern "C" void __sanitizer_cov_trace_pc() {
  static thread_local uint64_t before;
  const uint64_t place = (uint64_t)__builtin_return_address(0) * 0x9e3779b97f4a7c15ull >> 48;
  uint8_t *way = &seen[(place ^ before) % WAYS];
  before = place >> 1;
  if (!__atomic_load_n(way, __ATOMIC_RELAXED)) {
    __atomic_store_n(way, 1, __ATOMIC_RELAXED);
    __atomic_fetch_add(&ways, 1, __ATOMIC_RELAXED);
  }
}

int main(int count, char **arguments) {
  const uint64_t wanted = count > 1 ? strtoull(arguments[1], nullptr, 10) : 100000;
  Random random = {count > 2 ? strtoull(arguments[2], nullptr, 10) : 1};
  std::vector<Input> kept;
  for (uint64_t call = 0; call < wanted; call++) {
    Input input;
    for (uint8_t &each : input.bytes) each = (uint8_t)random.next();
    if (!kept.empty() && random.below(4)) input = changed(kept, random);
    const uint64_t known = ways;
    LLVMFuzzerTestOneInput(input.bytes, sizeof input.bytes);
    if (ways > known) kept.push_back(input);
  }
  static const char *const names[] = {"pack",        "average", "combine", "sums_without",
                                      "two vectors", "finite",  "wire",    "average"};
  for (int i = 0; i < 8; i++) printf("%-12s %llu\n", names[i], (unsigned long long)calls[i]);
  printf("refused      %llu\n", (unsigned long long)refusals);
  printf("ways         %llu, found by %zu inputs\n", (unsigned long long)ways, kept.size());
  return 0;
}
#endif
