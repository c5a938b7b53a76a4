// How many threads of OpenMP's pool, which is torch's too, may be used here and now.
#pragma once

#include <omp.h>
#include <pthread.h>

#include <algorithm>
#include <cstdint>

namespace fp8 {

// GNU's OpenMP hangs in a child of fork() whose parent has used threads: the pool is remembered, its threads are gone.
inline bool& forked() {
  static bool child = false;
  static int registered = pthread_atfork(nullptr, nullptr, [] { forked() = true; });
  (void)registered;
  return child;
}

inline int usable_threads(int wanted, int64_t pieces) {
  if (forked() || omp_in_parallel()) return 1;
  return int(std::max<int64_t>(1, std::min<int64_t>(wanted, pieces)));
}

// work(0), work(step), ... below count. One thread has no team: starting one takes a third of a microsecond.
template <class Work>
void for_each(int64_t count, int64_t step, int threads, const Work& work) {
  if (threads == 1) {
    for (int64_t i = 0; i < count; i += step) work(i);
    return;
  }
#pragma omp parallel for num_threads(threads)
  for (int64_t i = 0; i < count; i += step) work(i);
}

// The largest of them.
template <class Work>
uint32_t largest_of(int64_t count, int64_t step, int threads, const Work& work) {
  uint32_t most = 0;
  if (threads == 1) {
    for (int64_t i = 0; i < count; i += step) most = std::max(most, work(i));
    return most;
  }
#pragma omp parallel for num_threads(threads) reduction(max : most)
  for (int64_t i = 0; i < count; i += step) most = std::max(most, work(i));
  return most;
}

}  // namespace fp8
