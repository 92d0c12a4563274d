// y [M, N] = factor * x [M, K] w [N, K]^T for weights in float16, with all arithmetic in float32.
//
// w is stored in pairs of rows, 16 numbers of one and 16 of the other in turn, so that it is read once from front to
// back by every thread. The sums of a row of x do not depend on the other rows. K is a multiple of 16, N of 2.
#include <cstdint>
#if defined(_OPENMP)
#include <omp.h>
#endif
#if defined(__F16C__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int W = 16;  // numbers of a vector
#define WIDENED(p) (V) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(p)))
#elif defined(__F16C__)
constexpr int W = 8;
#define WIDENED(p) (V) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p)))
#else
constexpr int W = 4;
typedef _Float16 H __attribute__((vector_size(2 * W), aligned(2), may_alias));
#define WIDENED(p) __builtin_convertvector(*(const H*)(p), V)
#endif
typedef float V __attribute__((vector_size(4 * W), aligned(4), may_alias));
constexpr int PAIR = 2, LINE = 16, AHEAD = 1024;  // AHEAD: numbers that are fetched before they are needed
constexpr int MOST = 6;                           // rows of x whose sums fit into the registers

template <int M>
static void some_rows(const float* x, const uint16_t* w, float* y, long K, long N, long begin, long end, float factor) {
  for (long n = begin; n < end; n += PAIR) {
    V sums[M][PAIR] = {};
    for (long k = 0; k < K; k += LINE, w += PAIR * LINE) {
      __builtin_prefetch(w + AHEAD);
      for (int i = 0; i < LINE; i += W) {
        V wide[PAIR];
        for (int r = 0; r < PAIR; r++) wide[r] = WIDENED(w + r * LINE + i);
        for (int m = 0; m < M; m++) {
          V part = *(const V*)(x + m * K + k + i);
          for (int r = 0; r < PAIR; r++) sums[m][r] += part * wide[r];
        }
      }
    }
    for (int m = 0; m < M; m++)
      for (int r = 0; r < PAIR; r++) {
        V sum = sums[m][r];
        for (int half = W / 2; half > 0; half /= 2)
          for (int i = 0; i < half; i++) sum[i] += sum[i + half];
        y[m * N + n + r] = factor * sum[0];
      }
  }
}

typedef void Rows(const float*, const uint16_t*, float*, long, long, long, long, float);
static Rows* const ROWS[] = {nullptr,      some_rows<1>, some_rows<2>, some_rows<3>,
                             some_rows<4>, some_rows<5>, some_rows<6>};

extern "C" void half_pairs(const float* x, const uint16_t* w, float* y, long M, long K, long N, float factor,
                           int threads) {
#if defined(_OPENMP)
#pragma omp parallel num_threads(threads) if (threads > 1)
#endif
  {
    long thread = 0, all = 1;
#if defined(_OPENMP)
    thread = omp_get_thread_num(), all = omp_get_num_threads();
#endif
    long begin = N / PAIR * thread / all * PAIR, end = N / PAIR * (thread + 1) / all * PAIR;
    long step = M <= MOST ? N : 32;  // for more rows of x, some rows of w are read from the nearest cache
    for (long n = begin; n < end; n += step)
      for (long m = 0, count; m < M; m += count) {
        count = M - m <= MOST ? M - m : M - m < 2 * MOST ? (M - m + 1) / 2 : MOST;
        ROWS[count](x + m * K, w + n * K, y + m * N, K, N, n, n + step < end ? n + step : end, factor);
      }
  }
}
