// y [M, N] = factor * x [M, K] w [N, K]^T + bias [N] for weights in float16, with all arithmetic in float32. With a gain
// [K], x is first divided by the root of (the mean square of its row + eps), and multiplied by gain.
//
// w is stored in pairs of rows, 16 numbers of one and 16 of the other in turn, so that it is read once from front to
// back by every thread. The sums of a row of x do not depend on the other rows. K is a multiple of 16, N of 2.
// Registered by PyTorch's stable interface, so that a library made for one version serves later ones.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cmath>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <vector>
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
constexpr int MOST_DIMENSIONS = 64;               // of a tensor of PyTorch
constexpr long FEW = 1 << 16;                     // numbers of a weight that several threads read no faster than one

static inline float total(V sum) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)sum);
#elif defined(__F16C__)
  __m128 four = _mm_add_ps(_mm256_castps256_ps128((__m256)sum), _mm256_extractf128_ps((__m256)sum, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
#else
  return (sum[0] + sum[2]) + (sum[1] + sum[3]);
#endif
}

template <int M>
static void some_rows(const float* x, const uint16_t* w, const float* bias, float* y, long K, long N, long begin,
                      long end, float factor) {
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
      for (int r = 0; r < PAIR; r++) y[m * N + n + r] = factor * total(sums[m][r]) + (bias ? bias[n + r] : 0.0f);
  }
}

typedef void Rows(const float*, const uint16_t*, const float*, float*, long, long, long, long, float);
static Rows* const ROWS[] = {nullptr,      some_rows<1>, some_rows<2>, some_rows<3>,
                             some_rows<4>, some_rows<5>, some_rows<6>};

// A new tensor [..., N] for x [..., K], without the dispatcher, which would take as long as a small product.
static torch::stable::Tensor empty_like(const torch::stable::Tensor& x, int64_t N) {
  int64_t sizes[MOST_DIMENSIONS], strides[MOST_DIMENSIONS], stride = 1;
  const int64_t last = x.dim() - 1;
  for (int64_t d = last; d >= 0; d--) {
    sizes[d] = d == last ? N : x.size(d);
    strides[d] = stride;
    stride *= sizes[d];
  }
  AtenTensorHandle made;
  if (aoti_torch_empty_strided(last + 1, sizes, strides, aoti_torch_dtype_float32(), aoti_torch_device_type_cpu(), 0,
                               &made) != AOTI_TORCH_SUCCESS)
    throw std::runtime_error("half_pairs: no memory for the result");
  return torch::stable::Tensor(made);
}

static std::vector<float> normed(const float* x, const float* gain, long M, long K, float eps) {
  std::vector<float> found(M * K);
  for (long m = 0; m < M; m++, x += K) {
    V squares = {};
    for (long k = 0; k < K; k += W) squares += *(const V*)(x + k) * *(const V*)(x + k);
    const float scale = 1.0f / std::sqrt(total(squares) / K + eps);
    for (long k = 0; k < K; k++) found[m * K + k] = gain[k] * (x[k] * scale);
  }
  return found;
}

// x [..., K], packed [N / 2, K / 16, 2, 16], bias [N] and gain [K] to [..., N].
static torch::stable::Tensor half_pairs(torch::stable::Tensor x, torch::stable::Tensor packed,
                                        std::optional<torch::stable::Tensor> bias, double factor,
                                        std::optional<torch::stable::Tensor> gain, double eps) {
  if (!x.is_contiguous()) x = torch::stable::contiguous(x);
  const long N = packed.size(0) * PAIR, K = packed.size(1) * LINE, M = x.numel() / K;
  const torch::stable::Tensor y = empty_like(x, N);
  const float* from = (const float*)x.const_data_ptr();
  std::vector<float> scaled;
  if (gain) {
    scaled = normed(from, (const float*)gain->const_data_ptr(), M, K, eps);
    from = scaled.data();
  }
  const uint16_t* weight = (const uint16_t*)packed.const_data_ptr();
  const float* added = bias ? (const float*)bias->const_data_ptr() : nullptr;
  float* to = (float*)y.mutable_data_ptr();
  const long step = M <= MOST ? N : 32;  // for more rows of x, some rows of w are read from the nearest cache
  auto pairs = [&](int64_t first, int64_t last) {
    const long begin = first * PAIR, end = last * PAIR;
    for (long n = begin; n < end; n += step)
      for (long m = 0, count; m < M; m += count) {
        count = M - m <= MOST ? M - m : M - m < 2 * MOST ? (M - m + 1) / 2 : MOST;
        ROWS[count](from + m * K, weight + n * K, added, to + m * N, K, N, n, n + step < end ? n + step : end, factor);
      }
  };
  const int64_t threads = N * K > FEW ? torch::stable::get_num_threads() : 1;
  if (threads > 1)
    torch::stable::parallel_for(0, N / PAIR, (N / PAIR + threads - 1) / threads, pairs);
  else
    pairs(0, N / PAIR);
  return y;
}

STABLE_TORCH_LIBRARY_FRAGMENT(specbench, m) {
  m.def("half_pairs(Tensor x, Tensor packed, Tensor? bias, float factor, Tensor? gain=None, float eps=0) -> Tensor");
}
STABLE_TORCH_LIBRARY_IMPL(specbench, CPU, m) { m.impl("half_pairs", TORCH_BOX(&half_pairs)); }
