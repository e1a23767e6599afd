// The kernels of a layer for the CPU, in float32: products with packed matrices, norms, rotation, and attention.
//
// A matrix stays in the bits that hold its values, and is unpacked in registers. It is stored in panels of LANES
// rows: a word of a panel holds, in a lane for each of its rows, the next few numbers of that row. A product goes through
// a panel from its first column to its last with one sum for each row and token. So a token's result has the same bits
// whatever else is in the batch, and however many threads there are.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16, SUMS = 24;  // SUMS: registers that sums may take
#elif defined(__AVX__)
constexpr int LANES = 8, SUMS = 12;
#else
constexpr int LANES = 4, SUMS = 24;
#endif
constexpr int MOST_TOKENS = 16;       // tokens whose sums are in registers together
constexpr int CACHED_TOKENS = 128;    // tokens that a panel meets before the next panel comes
constexpr int CHUNK = 64;             // positions whose scores are held together
constexpr int MOST_VECTORS = 256 / LANES;  // of a head
constexpr int64_t WORTHWHILE = 1 << 13;  // numbers from which on threads share a pass over memory

typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));

template <class T> inline T load(const void* from) {
  T found;
  std::memcpy(&found, from, sizeof found);
  return found;
}

inline void store(float* to, Floats value) { std::memcpy(to, &value, sizeof value); }

// The sum over the lanes, always in the same order.
inline float sum_of(Floats value) {
  float values[LANES];
  store(values, value);
#pragma GCC unroll 4
  for (int width = LANES / 2; width; width /= 2)
    for (int i = 0; i < width; i++) values[i] += values[i + width];
  return values[0];
}

// A half-precision number that is finite.
inline Floats from_half(const uint16_t* from) {
  Ints bits = __builtin_convertvector(load<Halves>(from), Ints);
  Floats size = (Floats)((bits & 0x7fff) << 13) * 0x1p112f;
  return (Floats)((Ints)size | (bits & 0x8000) << 16);
}

// e to the x, to a few units in the last place; nothing below e^-87 and nothing above e^88.
inline Floats exponential(Floats x) {
  x = x < -87.0f ? Floats{} - 87.0f : x;
  x = x > 88.0f ? Floats{} + 88.0f : x;
  const float shift = 0x1.8p23f;  // adding it rounds to a whole number
  Floats whole = (x * 1.44269504f + shift) - shift;
  Floats r = x - whole * 0.693359375f + whole * 2.12194440e-4f;
  Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  return p * (Floats)((__builtin_convertvector(whole, Ints) + 127) << 23);
}

// -- threads --------------------------------------------------------------------------------------------------

inline void pause_a_little() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Threads that help whoever has a loop to run. The caller takes part, and waits for no helper that has not begun: where
// other programs keep the processors busy, or after a fork, the loop is done all the same.
class Helpers {
 public:
  // Calls body(0) to body(count - 1), in any order, by so many threads at most.
  template <class Body> void run(int64_t count, int threads, const Body& body) {
    std::unique_lock<std::mutex> turn(in_use_, std::try_to_lock);
    if (threads <= 1 || count <= 1 || !turn.owns_lock()) {
      for (int64_t i = 0; i < count; i++) body(i);
      return;
    }
    for (; num_ < threads - 1; num_++) std::thread(&Helpers::help, this, num_).detach();
    call_ = [](const void* context, int64_t i) { (*static_cast<const Body*>(context))(i); };
    context_ = &body;
    count_ = count;
    most_ = threads - 1;
    next_ = 0;
    is_open_ = true;
    number_++;
    if (asleep_) {
      std::lock_guard<std::mutex> guard(sleep_);
      wake_.notify_all();
    }
    work();
    is_open_ = false;
    for (int i = 0; inside_; i++) i < 1000 ? pause_a_little() : std::this_thread::yield();
  }

 private:
  void work() {
    for (int64_t i; (i = next_.fetch_add(1)) < count_;) call_(context_, i);
  }

  [[noreturn]] void help(int own) {
    for (int64_t seen = 0;;) {
      seen = await(seen);
      inside_++;  // the job stays as it is while somebody is inside and it was open
      if (is_open_ && own < most_) work();
      inside_--;
    }
  }

  // The number of a job that is not the one seen last: looks for a while, then sleeps.
  int64_t await(int64_t seen) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(100);
    do {
      for (int i = 0; i < 16; i++) {
        if (number_ != seen) return number_;
        pause_a_little();
      }
    } while (std::chrono::steady_clock::now() < end);
    std::unique_lock<std::mutex> guard(sleep_);
    asleep_++;
    wake_.wait(guard, [&] { return number_ != seen; });
    asleep_--;
    return number_;
  }

  std::mutex in_use_, sleep_;
  std::condition_variable wake_;
  int num_ = 0;
  void (*call_)(const void*, int64_t) = nullptr;
  const void* context_ = nullptr;
  int64_t count_ = 0;
  int most_ = 0;
  std::atomic<int64_t> next_{0}, number_{0};
  std::atomic<int> inside_{0}, asleep_{0};
  std::atomic<bool> is_open_{false};
};

Helpers& helpers() {
  static Helpers* const found = new Helpers;  // for ever: its threads never end
  return *found;
}

// -- products -------------------------------------------------------------------------------------------------

// A format says how many numbers a word has, how many columns share scales (BLOCK), how many scales those have, and of
// what type: a step, and an offset that is added.

inline Floats scale_at(const uint16_t* from) { return from_half(from); }
inline Floats scale_at(const float* from) { return load<Floats>(from); }

struct Float32 {
  using Scale = float;
  static constexpr int PER_WORD = 1, SCALES = 0, BLOCK = 1;
  static Floats number(Ints word, int) { return (Floats)word; }
};
struct Bfloat16 {
  using Scale = float;
  static constexpr int PER_WORD = 2, SCALES = 0, BLOCK = 2;
  static Floats number(Ints word, int i) { return (Floats)(i ? word & (int32_t)0xffff0000 : word << 16); }
};
template <int WIDTH, class SCALE> struct Int8 {
  using Scale = SCALE;
  static constexpr int PER_WORD = 4, SCALES = 2, BLOCK = WIDTH;
  static Floats number(Ints word, int i) { return __builtin_convertvector(word << (24 - 8 * i) >> 24, Floats); }
};
template <int WIDTH, class SCALE> struct Int4 {  // from 0
  using Scale = SCALE;
  static constexpr int PER_WORD = 8, SCALES = 2, BLOCK = WIDTH;
  static Floats number(Ints word, int i) { return __builtin_convertvector(word >> 4 * i & 15, Floats); }
};

struct Matrix {
  const int32_t* words;    // [panels, columns / PER_WORD, LANES]
  const void* scales;      // [panels, columns / BLOCK, SCALES, LANES]
  int64_t rows, columns;
};

// Some panels times some tokens: x is [columns, TOKENS], out [TOKENS, rows].
template <class Format, int TOKENS, int PANELS>
void multiply(const Matrix& matrix, int64_t panel, const float* x, const float* bias, float* out) {
  using Scale = typename Format::Scale;
  constexpr int PER_WORD = Format::PER_WORD, SCALES = Format::SCALES, BLOCK = Format::BLOCK;
  const int64_t blocks = matrix.columns / BLOCK;
  const int32_t* words[PANELS];
  const Scale* scales[PANELS];
  for (int p = 0; p < PANELS; p++) {
    words[p] = matrix.words + (panel + p) * (matrix.columns / PER_WORD) * LANES;
    scales[p] = (const Scale*)matrix.scales + (panel + p) * blocks * SCALES * LANES;
  }
  Floats sums[TOKENS][PANELS] = {};
  for (int64_t block = 0; block < blocks; block++) {
    Floats step[PANELS], offset[PANELS];
#pragma GCC unroll 4
    for (int p = 0; p < PANELS && SCALES; p++) {
      step[p] = scale_at(scales[p] + block * SCALES * LANES);
      offset[p] = scale_at(scales[p] + (block * SCALES + 1) * LANES);
    }
    for (int word = 0; word < BLOCK / PER_WORD; word++) {
      Ints bits[PANELS];
#pragma GCC unroll 4
      for (int p = 0; p < PANELS; p++) {
        bits[p] = load<Ints>(words[p]);
        words[p] += LANES;
      }
#pragma GCC unroll 8
      for (int i = 0; i < PER_WORD; i++, x += TOKENS) {
        Floats w[PANELS];
#pragma GCC unroll 4
        for (int p = 0; p < PANELS; p++) {
          w[p] = Format::number(bits[p], i);
          if (SCALES) w[p] = w[p] * step[p] + offset[p];
        }
#pragma GCC unroll 16
        for (int t = 0; t < TOKENS; t++)
#pragma GCC unroll 4
          for (int p = 0; p < PANELS; p++) sums[t][p] += w[p] * x[t];
      }
    }
  }
  for (int p = 0; p < PANELS; p++) {
    const int64_t first = (panel + p) * LANES, count = std::min<int64_t>(LANES, matrix.rows - first);
    for (int t = 0; t < TOKENS; t++) {
      float values[LANES];
      store(values, sums[t][p]);
      for (int lane = 0; lane < count; lane++)
        out[t * matrix.rows + first + lane] = bias ? values[lane] + bias[first + lane] : values[lane];
    }
  }
}

using Multiply = void (*)(const Matrix&, int64_t, const float*, const float*, float*);

struct Tile {
  int tokens, panels;
  Multiply whole, single;  // for `panels` panels, and for one
};

template <class Format, int TOKENS> constexpr Tile tile() {
  constexpr int PANELS = SUMS / TOKENS >= 4 ? 4 : SUMS / TOKENS >= 2 ? 2 : 1;
  return {TOKENS, PANELS, multiply<Format, TOKENS, PANELS>, multiply<Format, TOKENS, 1>};
}

template <class Format> Tile tile_for(int64_t tokens) {
  constexpr Tile tiles[] = {tile<Format, 1>(), tile<Format, 2>(),  tile<Format, 4>(),
                            tile<Format, 8>(), tile<Format, 12>(), tile<Format, MOST_TOKENS>()};
  return *std::find_if(std::begin(tiles), std::end(tiles), [=](const Tile& t) { return t.tokens >= tokens; });
}

// Tokens in groups of a tile, the numbers of a group's tokens side by side: [groups, columns, tile tokens].
void turn(const float* x, int64_t tokens, int64_t columns, int64_t size, float* out, int threads) {
  const int64_t groups = (tokens + size - 1) / size;
  helpers().run(groups, tokens * columns > WORTHWHILE ? threads : 1, [=](int64_t g) {
    const int64_t real = std::min(size, tokens - g * size);
    const float* from = x + g * size * columns;
    float* to = out + g * size * columns;
    for (int64_t k = 0; k < columns; k++, to += size) {
      for (int64_t t = 0; t < real; t++) to[t] = from[t * columns + k];
      for (int64_t t = real; t < size; t++) to[t] = 0;
    }
  });
}

// At most CACHED_TOKENS tokens.
template <class Format>
void few(const Matrix& matrix, const float* x, int64_t tokens, const float* bias, float* out, int threads) {
  static thread_local std::vector<float> turned_memory, last_memory;
  const int64_t columns = matrix.columns, panels = (matrix.rows + LANES - 1) / LANES;
  const int64_t fewest = (tokens + MOST_TOKENS - 1) / MOST_TOKENS;
  const Tile tile = tile_for<Format>((tokens + fewest - 1) / fewest);
  const int64_t size = tile.tokens, groups = (tokens + size - 1) / size, whole = tokens / size;
  turned_memory.resize(groups * size * columns);
  last_memory.resize(size * matrix.rows);  // the last group may have tokens that nobody asked for
  float *const turned = turned_memory.data(), *const last = last_memory.data();
  turn(x, tokens, columns, size, turned, threads);
  helpers().run((panels + tile.panels - 1) / tile.panels, threads, [&](int64_t step) {
    const int64_t first = step * tile.panels;
    for (int64_t g = 0; g < groups; g++) {
      float* const to = g < whole ? out + g * size * matrix.rows : last;
      const float* const from = turned + g * size * columns;
      if (first + tile.panels <= panels)
        tile.whole(matrix, first, from, bias, to);
      else
        for (int64_t p = first; p < panels; p++) tile.single(matrix, p, from, bias, to);
    }
  });
  if (whole < groups) std::copy_n(last, (tokens - whole * size) * matrix.rows, out + whole * size * matrix.rows);
}

template <class Format>
void product(const Matrix& matrix, const float* x, int64_t tokens, const float* bias, float* out, int threads) {
  for (int64_t t = 0; t < tokens; t += CACHED_TOKENS)
    few<Format>(matrix, x + t * matrix.columns, std::min<int64_t>(CACHED_TOKENS, tokens - t), bias,
                out + t * matrix.rows, threads);
}

// -- norms and attention --------------------------------------------------------------------------------------

// What a row is multiplied by, besides the weights.
float norm_scale(const float* x, int64_t width, float eps) {
  Floats squares = {};
  int64_t i = 0;
  for (; i + LANES <= width; i += LANES) squares += load<Floats>(x + i) * load<Floats>(x + i);
  float sum = sum_of(squares);
  for (; i < width; i++) sum += x[i] * x[i];
  return 1 / std::sqrt(sum / width + eps);
}

struct Cache {
  const float *keys, *values;  // [num_pages, page_size, kv_heads, head_dim]
  const int32_t* table;        // [num_rows, width]
  int64_t width, page_size, kv_heads, head_dim;

  // Where keys and values of CHUNK positions are; behind the last position it is repeated.
  void find(int64_t row, int64_t position, int64_t last, int64_t head, const float** key, const float** value) const {
    int64_t page = position / page_size, place = position % page_size, offset = 0;
    for (int i = 0; i < CHUNK; i++, position++) {
      if (position <= last) {
        offset = ((table[row * width + page] * page_size + place) * kv_heads + head) * head_dim;
        if (++place == page_size) page++, place = 0;
      }
      key[i] = keys + offset;
      value[i] = values + offset;
    }
  }
};

// LANES vectors to one that has the sum of each.
inline Floats sums_of(Floats (&vectors)[LANES]) {
#if defined(__GNUC__) && !defined(__clang__)
  // Neighbours are halved and put side by side: pieces with even numbers, and those with odd ones, which are added.
#pragma GCC unroll 4
  for (int piece = LANES / 2, count = LANES / 2; piece; piece /= 2, count /= 2) {
    Ints even = {};
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) even[i] = i / piece * 2 * piece + i % piece;
    const Ints odd = even + piece;
#pragma GCC unroll 8
    for (int i = 0; i < count; i++) {
      const Floats a = vectors[2 * i], b = vectors[2 * i + 1];
      vectors[i] = __builtin_shuffle(a, b, even) + __builtin_shuffle(a, b, odd);
    }
  }
  return vectors[0];
#else
  Floats found;
  for (int i = 0; i < LANES; i++) found[i] = sum_of(vectors[i]);
  return found;
#endif
}

// The queries that share one key head, over the positions from first to last: online softmax, chunk by chunk.
template <int VECTORS>
void attend_head(const Cache& cache, int64_t row, int64_t first, int64_t last, int64_t head, const float* queries,
                 int64_t count, float* out) {
  constexpr int WIDTH = VECTORS * LANES;
  constexpr float NOTHING = -std::numeric_limits<float>::infinity();
  static thread_local std::vector<float> most, sums;
  const float scale = 1 / std::sqrt((float)WIDTH);
  most.assign(count, NOTHING);
  sums.assign(count, 0);
  std::fill_n(out, count * WIDTH, 0.0f);
  for (int64_t start = first; start <= last; start += CHUNK) {
    const int64_t seen = std::min<int64_t>(CHUNK, last + 1 - start);
    const float *keys[CHUNK], *values[CHUNK];
    cache.find(row, start, last, head, keys, values);
    for (int64_t h = 0; h < count; h++) {
      Floats query[VECTORS], mixed[VECTORS];
      float scores[CHUNK], highest = most[h];
      for (int d = 0; d < VECTORS; d++) query[d] = load<Floats>(queries + h * WIDTH + d * LANES) * scale;
      for (int64_t group = 0; group < seen; group += LANES) {
        Floats products[LANES];
        for (int i = 0; i < LANES; i++) {
          products[i] = query[0] * load<Floats>(keys[group + i]);
          for (int d = 1; d < VECTORS; d++) products[i] += query[d] * load<Floats>(keys[group + i] + d * LANES);
        }
        store(scores + group, sums_of(products));
      }
      for (int64_t i = 0; i < seen; i++) highest = std::max(highest, scores[i]);
      for (int64_t i = seen; i < CHUNK; i++) scores[i] = NOTHING;
      for (int64_t i = 0; i < CHUNK; i += LANES) store(scores + i, exponential(load<Floats>(scores + i) - highest));
      const float shrunk = std::exp(most[h] - highest);
      most[h] = highest;
      sums[h] *= shrunk;
      for (int d = 0; d < VECTORS; d++) mixed[d] = load<Floats>(out + h * WIDTH + d * LANES) * shrunk;
      for (int64_t i = 0; i < seen; i++) {
        sums[h] += scores[i];
        for (int d = 0; d < VECTORS; d++) mixed[d] += load<Floats>(values[i] + d * LANES) * scores[i];
      }
      for (int d = 0; d < VECTORS; d++) store(out + h * WIDTH + d * LANES, mixed[d]);
    }
  }
  for (int64_t h = 0; h < count; h++)
    for (int64_t i = 0; i < WIDTH; i++) out[h * WIDTH + i] /= sums[h];
}

using AttendHead = void (*)(const Cache&, int64_t, int64_t, int64_t, int64_t, const float*, int64_t, float*);

template <int... NUMBERS> AttendHead attend_head_for(int64_t vectors, std::integer_sequence<int, NUMBERS...>) {
  static constexpr AttendHead heads[] = {attend_head<NUMBERS + 1>...};
  return heads[vectors - 1];
}

// -- finding the steps of a matrix --------------------------------------------------------------------------------

// The fewest even steps from the least of these numbers to the most that meet all of them, but for rounding; 0 where
// there are none. Numbers that are all the same are no step apart.
int steps_of(const float* x, int count, int most_steps, float* step, float* offset) {
  const auto [least, most] = std::minmax_element(x, x + count);
  const double range = (double)*most - *least;
  const double tolerance = (std::max(std::fabs(*least), std::fabs(*most)) + range) * 0x1p-22;
  *offset = *least;
  *step = 0;
  if (range <= tolerance) return std::isfinite(range) && range == 0;
  for (int steps = 1; steps <= most_steps; steps++) {
    const double size = range / steps;
    if (size < 4 * tolerance) return 0;
    *step = (float)size;
    int i = 0;
    for (; i < count; i++) {
      const double away = (x[i] - (double)*least) / size;
      if (std::fabs(away - std::nearbyint(away)) * size > tolerance) break;
    }
    if (i == count) return steps;
  }
  return 0;
}

}  // namespace

#include "picking.h"

extern "C" {

int lanes() { return LANES; }

// Every block of so many columns as whole numbers of steps from an offset, at most `most_steps` of them: levels is [rows,
// columns], steps and offsets [rows, columns / block]. Returns how many blocks can't be had so.
int64_t stepped(const float* x, int64_t rows, int64_t columns, int64_t block, int most_steps, uint8_t* levels,
                float* steps, float* offsets, int threads) {
  const int64_t blocks = columns / block;
  std::atomic<int64_t> failed{0};
  helpers().run(rows, threads, [&](int64_t row) {
    for (int64_t b = 0; b < blocks && !failed; b++) {
      const int64_t first = row * columns + b * block, place = row * blocks + b;
      if (!steps_of(x + first, block, most_steps, steps + place, offsets + place)) failed++;
      const double size = steps[place] ? steps[place] : 1;
      for (int64_t i = first; i < first + block; i++)
        levels[i] = (uint8_t)std::nearbyint((x[i] - (double)offsets[place]) / size);
    }
  });
  return failed;
}

// Whether `attended` takes heads that are so wide.
int can_attend(int64_t head_dim) { return head_dim % LANES == 0 && head_dim / LANES <= MOST_VECTORS; }

// sum = x + delta where there is a delta; out = norm(sum).
void normed(const float* x, const float* delta, const float* weight, float eps, int64_t tokens, int64_t width,
            float* sum, float* out, int threads) {
  helpers().run(tokens, tokens * width > WORTHWHILE ? threads : 1, [=](int64_t t) {
    const float* row = x + t * width;
    float *__restrict const added = sum + t * width, *__restrict const to = out + t * width;
    if (delta) {
      for (int64_t i = 0; i < width; i++) added[i] = row[i] + delta[t * width + i];
      row = added;
    }
    const float scale = norm_scale(row, width, eps);
    for (int64_t i = 0; i < width; i++) to[i] = row[i] * scale * weight[i];
  });
}

// x is [tokens, 2, width]: out = silu of the first half times the second.
void gated(const float* x, int64_t tokens, int64_t width, float* out, int threads) {
  helpers().run(tokens, tokens * width > WORTHWHILE ? threads : 1, [=](int64_t t) {
    const float *gate = x + t * 2 * width, *up = gate + width;
    float* const to = out + t * width;
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) {
      const Floats g = load<Floats>(gate + i);
      store(to + i, g / (1.0f + exponential(-g)) * load<Floats>(up + i));
    }
    for (; i < width; i++) to[i] = gate[i] / (1.0f + std::exp(-gate[i])) * up[i];
  });
}

// x, normed first where there is a norm (as `normed` does it), times the matrix transposed, plus the bias where there is
// one, and gated where that is asked for (as `gated` does it).
void projected(const float* x, const float* delta, const float* norm, float eps, float* sum, int64_t tokens, int format,
               const int32_t* words, const void* scales, int64_t rows, int64_t columns, const float* bias,
               int is_gated, float* out, int threads) {
  static thread_local std::vector<float> normed_memory, gated_memory;
  const Matrix matrix{words, scales, rows, columns};
  if (norm) {
    normed_memory.resize(tokens * columns);
    normed(x, delta, norm, eps, tokens, columns, sum, normed_memory.data(), threads);
    x = normed_memory.data();
  }
  if (is_gated) gated_memory.resize(tokens * rows);
  float* const product_out = is_gated ? gated_memory.data() : out;
  switch (format) {
    case 0: product<Int4<32, uint16_t>>(matrix, x, tokens, bias, product_out, threads); break;
    case 1: product<Int4<32, float>>(matrix, x, tokens, bias, product_out, threads); break;
    case 2: product<Int8<32, uint16_t>>(matrix, x, tokens, bias, product_out, threads); break;
    case 3: product<Int8<16, float>>(matrix, x, tokens, bias, product_out, threads); break;
    case 4: product<Bfloat16>(matrix, x, tokens, bias, product_out, threads); break;
    case 5: product<Float32>(matrix, x, tokens, bias, product_out, threads); break;
  }
  if (is_gated) gated(product_out, tokens, rows / 2, out, threads);
}

// qkv is [tokens, heads + 2 * kv_heads, head_dim]: norm and rotate queries and keys, write keys and values to slots.
void rotated(const float* qkv, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t head_dim, const float* q_norm,
             float q_eps, const float* k_norm, float k_eps, const float* cos, const float* sin, const int64_t* slots, float* keys,
             float* values, float* queries, int threads) {
  const int64_t turned = heads + kv_heads, half = head_dim / 2;
  helpers().run(tokens, tokens * turned * head_dim > WORTHWHILE ? threads : 1, [=](int64_t t) {
    const float *row = qkv + t * (turned + kv_heads) * head_dim, *c = cos + t * head_dim, *s = sin + t * head_dim;
    float* const key = keys + slots[t] * kv_heads * head_dim;
    for (int64_t h = 0; h < turned; h++) {
      const float* const x = row + h * head_dim;
      const float* const norm = h < heads ? q_norm : k_norm;
      float* __restrict const to = h < heads ? queries + (t * heads + h) * head_dim : key + (h - heads) * head_dim;
      const float scale = norm ? norm_scale(x, head_dim, h < heads ? q_eps : k_eps) : 1;
      for (int64_t d = 0; d < half; d++) {
        const float low = x[d] * (norm ? scale * norm[d] : 1), high = x[d + half] * (norm ? scale * norm[d + half] : 1);
        to[d] = low * c[d] + high * s[d];
        to[d + half] = high * c[d + half] + low * s[d + half];
      }
    }
    std::copy_n(row + turned * head_dim, kv_heads * head_dim, values + slots[t] * kv_heads * head_dim);
  });
}

// Every token sees its row's positions up to its own, the last `window` of them where that is not 0.
void attended(const float* q, int64_t tokens, int64_t heads, const float* keys, const float* values,
              int64_t page_size, int64_t kv_heads, int64_t head_dim, const int64_t* rows, const int64_t* positions,
              const int32_t* table, int64_t width, int64_t window, float* out, int threads) {
  const Cache cache{keys, values, table, width, page_size, kv_heads, head_dim};
  const int64_t shared = heads / kv_heads;
  const AttendHead attend = attend_head_for(head_dim / LANES, std::make_integer_sequence<int, MOST_VECTORS>());
  helpers().run(tokens * kv_heads, threads, [&](int64_t i) {
    const int64_t t = i / kv_heads, head = i % kv_heads, last = positions[t];
    const int64_t first = window ? std::max<int64_t>(0, last + 1 - window) : 0;
    const int64_t place = (t * heads + head * shared) * head_dim;
    attend(cache, rows[t], first, last, head, q + place, shared, out + place);
  });
}

// The token of every row: the highest logit's, where there are temperatures a draw, where there is a top_k (and top_p and
// min_p) one that truncation keeps. Below 0 where the logits are none.
void picked(const float* logits, int64_t rows, int64_t stride, int64_t vocab, const float* temperature,
            const int32_t* top_k, const float* top_p, const float* min_p, const int64_t* seeds,
            const int64_t* positions, int64_t* out, int threads) {
  Picking picking(logits, rows, stride, vocab, out, threads);
  picking.take_highest();
  if (temperature) picking.draw(temperature, seeds, positions);
  if (temperature && top_k) picking.truncate(top_k, top_p, min_p);
}

// The noise of these hashes.
void noises(const uint32_t* hashes, int64_t count, float* out) {
  for (int64_t i = 0; i + LANES <= count; i += LANES) store(out + i, noise_of(load<Words>(hashes + i)));
}

}  // extern "C"
