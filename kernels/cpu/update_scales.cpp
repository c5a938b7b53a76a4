// Delayed scaling's update of all slots of a format: kernels/delayed_scaling.py, `update`, bit for bit, in place.
//
//   amaxes [C], history [C, L], scales [2, C], known [2, C]: fp32; counts [10, C], room [1]: int32. See the rows of `counts` there.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "kernels.h"

namespace {

enum Row { RUNS, ENTERED, SATURATED, CLIPPED, SMALL, OVER, HOLD, MARGIN, LOOK, STEADY };
enum Algorithm { MAX, MOST_RECENT, P99, FROZEN };

constexpr int RUNS_WITH_ROOM = 2;
constexpr float ABSENT = -1.0f, MOST = std::numeric_limits<float>::max(), INF = std::numeric_limits<float>::infinity();

// Of a number above 1, Inf included: 1 up to 2, 2 up to 4, at most 32.
int ceil_log2(float x) {
  int32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return std::clamp(((bits + 0x7FFFFF) >> 23) - 127, 0, 32);
}

float power_of_two(int exponent) {
  const uint32_t bits = static_cast<uint32_t>(exponent + 127) << 23;
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// Where in the ring the amax with that number is. A damaged state may count below 0: that is a place in the ring, too.
int64_t place(int64_t number, int64_t length) { return (number % length + length) % length; }

float summary(const float* history, int64_t length, int32_t entered, int algorithm, std::vector<float>& falling) {
  if (algorithm == MAX) return *std::max_element(history, history + length);
  if (algorithm == MOST_RECENT) return history[place(int64_t(entered) - 1, length)];
  falling.assign(history, history + length);
  std::sort(falling.begin(), falling.end(), std::greater<float>());
  const int64_t known = std::clamp<int64_t>(entered, 1, length);
  const float from_top = 0.010000000000000009f * static_cast<float>(known - 1);  // 1 - 0.99
  const float above = std::floor(from_top);
  const int64_t at = static_cast<int64_t>(above);
  const float high = falling[at], low = falling[std::min(at + 1, length - 1)];
  return high - (high - low) * (from_top - above);
}

}  // namespace

extern "C" void fp8_update_scales(int64_t slots, int64_t length, float* amaxes, float* history, float* scales,
                                  int32_t* counts, int32_t* room_of_all, float* known, float largest,
                                  float saturated_above, float small_below, int most_room, int algorithm,
                                  int interval) {
  auto count = [counts, slots](Row row, int64_t slot) -> int32_t& { return counts[row * slots + slot]; };
  int room = *room_of_all;  // of slots elsewhere, once the old need of these is taken off
  for (int64_t i = 0; i < slots; ++i) {
    const float amax = amaxes[i];
    if (count(HOLD, i) > 0) room -= count(OVER, i);
    if (amax != ABSENT) {
      count(RUNS, i) += 1;
      count(HOLD, i) = std::max(count(HOLD, i) - 1, 0);
    }
    if (amax >= 0 && amax < INF) {
      history[i * length + place(count(ENTERED, i), length)] = amax;
      count(ENTERED, i) += 1;
      const float reached = amax * scales[i];
      const bool known = scales[i] > 0 && !count(LOOK, i), saturated = known && reached > saturated_above;
      count(SATURATED, i) += saturated;
      count(CLIPPED, i) += known && reached > largest * 2.0f;
      count(SMALL, i) += known && amax > 0 && reached < small_below;
      if (saturated && !count(STEADY, i)) {
        count(OVER, i) = ceil_log2(reached * (1.0f / largest));
        count(HOLD, i) = RUNS_WITH_ROOM;
      }
    }
    if (count(HOLD, i) > 0) room += count(OVER, i);
  }
  *room_of_all = room;
  room = std::clamp(room, 0, most_room);
  std::vector<float> falling;
  for (int64_t i = 0; i < slots; ++i) {
    float *quant_scale = scales + i, *dequant_scale = scales + slots + i;
    const bool present = amaxes[i] != ABSENT;
    const int own_room = count(STEADY, i) ? 0 : room;
    const bool due = (present && (count(RUNS, i) % interval == 0 || *quant_scale == 0)) || own_room > 0;
    if (due && algorithm != FROZEN) {
      const float m = summary(history + i * length, length, count(ENTERED, i), algorithm, falling);
      // Two roundings, as a number over a tensor has them in PyTorch: reciprocal, then product.
      if (m > 0) {
        const float reach = std::min(m * power_of_two(count(MARGIN, i) + own_room), MOST);
        *quant_scale = std::min((1.0f / reach) * largest, MOST);
      }
    }
    if (*quant_scale > 0 && algorithm != FROZEN) *dequant_scale = 1.0f / *quant_scale;
    amaxes[i] = ABSENT;
    const bool look = count(LOOK, i);
    known[i] = look ? 0.0f : *quant_scale;
    known[slots + i] = look ? 0.0f : *dequant_scale;
  }
}
