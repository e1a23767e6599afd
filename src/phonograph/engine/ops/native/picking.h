// Picking tokens, by the rule of engine/sampling/sampler.py. Part of kernels.cpp, whose vectors and helpers it uses.
//
// The best token after Gumbel noise is a draw. If truncation does not keep it, neither does it keep anything after it, and
// the next draw is among those ahead of it. Nothing is sorted.

#pragma once

namespace {

typedef uint32_t Words __attribute__((vector_size(LANES * 4)));

constexpr int64_t SHARE = 8192;  // tokens that a thread looks at before it takes the next ones; whole vectors
constexpr int64_t NOT_FINITE = -1, NOTHING_ALLOWED = -2;
constexpr float INFINITE = std::numeric_limits<float>::infinity();

// A hash of 32 bits that can be undone.
template <class T> inline T mixed(T x) {
  x = (x ^ x >> 16) * 0x7FEB352Du;
  x = (x ^ x >> 15) * 0x846CA68Bu;
  return x ^ x >> 16;
}

// The 64 bits of the hash that the tokens of a row share.
struct RowHash {
  uint32_t first, second;

  RowHash(int64_t seed, int64_t position) {
    uint32_t low = (uint32_t)seed, high = (uint32_t)((uint64_t)seed >> 32);
    low = mixed(low ^ mixed(high + 0x9E3779B9u));
    high = mixed(high ^ mixed(low + 0x7F4A7C15u));
    first = mixed(low + (uint32_t)position * 0x9E3779B9u);
    second = mixed(high ^ first);
  }
};

// t + t^3/3 + t^5/5 + …, so many terms of it.
template <int TERMS> inline Floats area_tangent(Floats t) {
  const Floats square = t * t;
  Floats sum = Floats{} + 1.0f / (2 * TERMS - 1);
#pragma GCC unroll 8
  for (int i = TERMS - 2; i >= 0; i--) sum = sum * square + 1.0f / (2 * i + 1);
  return t * sum;
}

// The logarithm of normal numbers above 0: of 2^e * m with m near 1, by the area tangent of (m - 1) / (m + 1).
inline Floats logarithm(Floats x) {
  const Ints bits = (Ints)x, exponent = (bits - 0x3F3504F3) >> 23;  // m from the square root of 1/2 to that of 2
  const Floats m = (Floats)(bits - (exponent << 23)), e = __builtin_convertvector(exponent, Floats);
  return e * 0.693359375f + (2.0f * area_tangent<5>((m - 1.0f) / (m + 1.0f)) - e * 2.12194440e-4f);
}

// Gumbel noise of hashes, by the distance of their place in (0, 1) from the nearer end: finite for every hash.
inline Floats noise_of(Words hashed) {
  const Ints is_low = (Ints)hashed >= 0, nearer = is_low ? (Ints)hashed : ~(Ints)hashed;
  const Floats distance = (__builtin_convertvector(nearer, Floats) + 0.5f) * 0x1p-32f;
  const Floats below_one = 2.0f * area_tangent<8>(distance / (2.0f - distance));  // -log(1 - distance)
  return -logarithm(is_low ? -logarithm(distance) : below_one);
}

inline Words hashed(const RowHash& row, Words tokens) {
  return mixed<Words>(mixed<Words>((tokens * 0x85EBCA6Bu) ^ row.first) + row.second);
}

// A row of logits: how far they are below the highest, over the temperature; and the noise.
struct Row {
  const float* logits;
  int64_t vocab;
  float top, temperature;
  RowHash hash;

  // Of LANES tokens from `start` on; -inf behind the last.
  Floats raw(int64_t start) const {
    if (start + LANES <= vocab) return load<Floats>(logits + start);
    float padded[LANES];
    std::fill_n(padded, LANES, -INFINITE);
    std::copy_n(logits + start, vocab - start, padded);
    return load<Floats>(padded);
  }
  Floats scaled(int64_t start) const { return (raw(start) - top) / temperature; }
  float scaled_one(int64_t token) const { return (logits[token] - top) / temperature; }
};

inline Ints counting() {
  Ints found = {};
  for (int i = 0; i < LANES; i++) found[i] = i;
  return found;
}

struct Best {
  float score = -INFINITE;
  int64_t token = 0;

  // Of equal scores the first token's stands.
  void take(float other, int64_t at) {
    if (other > score || (other == score && at < token)) score = other, token = at;
  }
};

// The token with the highest score among some; `score_of` takes the first of LANES tokens.
template <class Score> Best best_of(int64_t start, int64_t end, const Score& score_of) {
  Floats best = {};
  best -= INFINITE;
  Ints found = {}, at = counting() + (int32_t)start;
  found += (int32_t)start;
  for (int64_t i = start; i < end; i += LANES, at += LANES) {
    const Floats score = score_of(i);
    const Ints is_higher = score > best;
    found = is_higher ? at : found;
    best = is_higher ? score : best;
  }
  Best whole{best[0], found[0]};
  for (int i = 1; i < LANES; i++) whole.take(best[i], found[i]);
  return whole;
}

Best drawn_from(const Row& row, int64_t start, int64_t end) {
  const Words first = (Words)counting();
  return best_of(start, end, [&](int64_t i) {
    return row.scaled(i) + noise_of(hashed(row.hash, first + (uint32_t)i));
  });
}

struct Cut {
  int64_t top_k;  // the vocabulary's size where all are kept
  float top_p, min_p;
};

struct Candidate {
  float scaled, weight, score;
  int32_t token;

  bool is_ahead_of(const Candidate& other) const {
    return scaled > other.scaled || (scaled == other.scaled && token > other.token);
  }
};

// The tokens that stand before one, with their scores.
std::vector<Candidate> ahead_of(const Row& row, const Candidate& last) {
  std::vector<Candidate> found;
  const Words first = (Words)counting();
  for (int64_t i = 0; i < row.vocab; i += LANES) {
    const Floats scaled = row.scaled(i);
    const Ints is_near = scaled >= last.scaled;
    bool any = false;
    for (int lane = 0; lane < LANES; lane++) any |= is_near[lane];
    if (!any) continue;
    const Floats weights = exponential(scaled), scores = scaled + noise_of(hashed(row.hash, first + (uint32_t)i));
    for (int lane = 0; lane < LANES && i + lane < row.vocab; lane++) {
      const Candidate one{scaled[lane], weights[lane], scores[lane], (int32_t)(i + lane)};
      if (one.is_ahead_of(last)) found.push_back(one);
    }
  }
  return found;
}

// (How many stand above one, what those weigh that stand before it.)
std::pair<int64_t, double> tally(const std::vector<Candidate>& candidates, const Candidate& one) {
  int64_t above = 0;
  double mass = 0;
  for (const Candidate& other : candidates) {
    above += other.scaled > one.scaled;
    if (other.is_ahead_of(one)) mass += other.weight;
  }
  return {above, mass};
}

// What the tokens weigh that top-k keeps, with all that equal the last.
double kept_mass(const Row& row, int64_t top_k) {
  static thread_local std::vector<float> all;
  all.resize((row.vocab + LANES - 1) / LANES * LANES);
  for (int64_t i = 0; i < row.vocab; i += LANES) store(all.data() + i, row.scaled(i));
  float least = -INFINITE;
  if (top_k < row.vocab) {
    std::nth_element(all.begin(), all.begin() + (top_k - 1), all.end(), std::greater<float>());
    least = all[top_k - 1];
  }
  Floats masses = {};
  double mass = 0;
  for (int64_t i = 0, count = 0; i < row.vocab; i += LANES) {
    const Floats scaled = row.scaled(i);
    masses += scaled >= least ? exponential(scaled) : Floats{};
    if (++count % 64 == 0) mass += sum_of(masses), masses = Floats{};
  }
  return mass + sum_of(masses);
}

// Whether top-p keeps what has this mass before it, of a whole. In float32 like the other samplers: in double the 0.3 of
// a float is more than that of ten equals, and a fourth would stay.
bool is_in_top_p(double before, float top_p, double whole) {
  const float edge = top_p * (float)whole;
  return (float)before < edge;
}

// The first draw that truncation keeps, from the draw over all tokens on.
int64_t first_kept(const Row& row, const Cut& cut, int64_t token) {
  Candidate drawn{row.scaled_one(token), 0, 0, (int32_t)token};
  std::vector<Candidate> left = ahead_of(row, drawn);
  double whole = -1;  // known when it is needed
  while (true) {
    const float weight = std::exp(drawn.scaled);
    const auto [above, mass] = tally(left, drawn);
    bool is_kept = above < cut.top_k && weight >= cut.min_p;
    // What top-k leaves weighs at least as much as the draw and all before it.
    if (is_kept && cut.top_p < 1 && !is_in_top_p(mass, cut.top_p, mass + weight)) {
      if (whole < 0) whole = kept_mass(row, cut.top_k);
      is_kept = is_in_top_p(mass, cut.top_p, whole);
    }
    const auto is_behind = [&](const Candidate& other) { return !other.is_ahead_of(drawn); };
    left.erase(std::remove_if(left.begin(), left.end(), is_behind), left.end());
    if (is_kept || left.empty()) return drawn.token;
    drawn = *std::max_element(left.begin(), left.end(),
                              [](const Candidate& a, const Candidate& b) { return a.score < b.score; });
  }
}

// Every row's token, or what is wrong with its logits.
class Picking {
 public:
  Picking(const float* logits, int64_t rows, int64_t stride, int64_t vocab, int64_t* out, int threads)
      : logits_(logits), rows_(rows), stride_(stride), vocab_(vocab), shares_((vocab + SHARE - 1) / SHARE), out_(out),
        threads_(rows * vocab > WORTHWHILE ? threads : 1), tops_(rows) {}

  void take_highest() {
    std::vector<Best> found(rows_ * shares_);
    std::vector<char> broken(rows_ * shares_);
    helpers().run(rows_ * shares_, threads_, [&](int64_t i) {
      const Row row{logits_ + i / shares_ * stride_, vocab_, 0, 1, RowHash(0, 0)};
      Ints is_broken = {};
      found[i] = best_of(first(i), last(i), [&](int64_t at) {
        const Floats raw = row.raw(at);
        is_broken |= ~(raw < INFINITE);  // NaN too
        return raw;
      });
      for (int lane = 0; lane < LANES; lane++) broken[i] |= is_broken[lane] != 0;
    });
    for (int64_t r = 0; r < rows_; r++) {
      const Best best = best_share(found, r);
      tops_[r] = best.score;
      out_[r] = best.score == -INFINITE ? NOTHING_ALLOWED : best.token;
      for (int64_t i = r * shares_; i < (r + 1) * shares_; i++)
        if (broken[i]) out_[r] = NOT_FINITE;
    }
  }

  // Instead of the highest, for rows with a temperature.
  void draw(const float* temperature, const int64_t* seeds, const int64_t* positions) {
    for (int64_t r = 0; r < rows_; r++)
      if (temperature[r] > 0 && out_[r] >= 0)
        drawn_.push_back({r, {logits_ + r * stride_, vocab_, tops_[r], temperature[r], RowHash(seeds[r], positions[r])}});
    std::vector<Best> found(drawn_.size() * shares_);
    helpers().run(found.size(), threads_, [&](int64_t i) {
      found[i] = drawn_from(drawn_[i / shares_].second, first(i), last(i));
    });
    for (size_t d = 0; d < drawn_.size(); d++) out_[drawn_[d].first] = best_share(found, d).token;
  }

  // Instead of those draws, the first ones that truncation keeps.
  void truncate(const int32_t* top_k, const float* top_p, const float* min_p) {
    helpers().run(drawn_.size(), threads_, [&](int64_t d) {
      const auto& [r, row] = drawn_[d];
      const Cut cut{top_k[r] ? std::min<int64_t>(top_k[r], vocab_) : vocab_, top_p[r], min_p[r]};
      if (cut.top_k < vocab_ || cut.top_p < 1 || cut.min_p > 0) out_[r] = first_kept(row, cut, out_[r]);
    });
  }

 private:
  int64_t first(int64_t i) const { return i % shares_ * SHARE; }
  int64_t last(int64_t i) const { return std::min(first(i) + SHARE, vocab_); }
  Best best_share(const std::vector<Best>& found, int64_t row) const {
    Best best = found[row * shares_];
    for (int64_t i = row * shares_ + 1; i < (row + 1) * shares_; i++) best.take(found[i].score, found[i].token);
    return best;
  }

  const float* const logits_;
  const int64_t rows_, stride_, vocab_, shares_;
  int64_t* const out_;
  const int threads_;
  std::vector<float> tops_;
  std::vector<std::pair<int64_t, Row>> drawn_;  // rows with a temperature, by their numbers
};

}  // namespace
