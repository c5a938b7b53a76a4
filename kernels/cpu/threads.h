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

}  // namespace fp8
