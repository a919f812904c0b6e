// Vectors of floats and doubles, and loads and stores of every dtype to and from them.
// Included once per instruction set, by layer_norm_kernels.h: see there.

// How wide a vector is. Plain operators work on them: these are the compiler's vector extensions.
constexpr int kVectorBytes = FASTNORM_CPU_VECTOR_BYTES;

struct Float16 {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

// Float<T> is the type of all arithmetic on rows of T.
template <typename T>
struct Accumulation {
  using Type = float;
};
template <>
struct Accumulation<double> {
  using Type = double;
};
template <typename T>
using Float = typename Accumulation<T>::Type;

template <typename F>
struct VectorTypes;
template <>
struct VectorTypes<float> {
  using Lane = int32_t;
  typedef float Value __attribute__((vector_size(kVectorBytes)));
  typedef int32_t Bits __attribute__((vector_size(kVectorBytes)));
};
template <>
struct VectorTypes<double> {
  using Lane = int64_t;
  typedef double Value __attribute__((vector_size(kVectorBytes)));
  typedef int64_t Bits __attribute__((vector_size(kVectorBytes)));
};
template <typename F>
using Vector = typename VectorTypes<F>::Value;
template <typename F>
using Bits = typename VectorTypes<F>::Bits;

typedef uint32_t Words __attribute__((vector_size(kVectorBytes)));
typedef uint16_t Halves __attribute__((vector_size(kVectorBytes / 2)));

template <typename F>
constexpr int64_t kLanes = kVectorBytes / static_cast<int64_t>(sizeof(F));

#define FASTNORM_INLINE [[gnu::always_inline]] inline

template <typename V, typename T>
FASTNORM_INLINE V load_bits(const T* from) {
  V value;
  __builtin_memcpy(&value, from, sizeof(V));
  return value;
}

template <typename V, typename T>
FASTNORM_INLINE void store_bits(T* to, V value) {
  __builtin_memcpy(to, &value, sizeof(V));
}

FASTNORM_INLINE Words select(Words mask, Words yes, Words no) {
  return (mask & yes) | (~mask & no);
}

// a * b + c, with one rounding where the instruction set has one for it. Written out, so that bits
// do not depend on where the compiler would see one.
#if defined(__x86_64__) && FASTNORM_CPU_VECTOR_BYTES == 64

template <typename F>
FASTNORM_INLINE Vector<F> multiply_add(Vector<F> a, Vector<F> b, Vector<F> c) {
  if constexpr (sizeof(F) == sizeof(float)) {
    return (Vector<F>)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
  } else {
    return (Vector<F>)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
  }
}

#elif defined(__x86_64__) && FASTNORM_CPU_VECTOR_BYTES == 32

template <typename F>
FASTNORM_INLINE Vector<F> multiply_add(Vector<F> a, Vector<F> b, Vector<F> c) {
  if constexpr (sizeof(F) == sizeof(float)) {
    return (Vector<F>)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
  } else {
    return (Vector<F>)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
  }
}

#elif defined(__aarch64__)

template <typename F>
FASTNORM_INLINE Vector<F> multiply_add(Vector<F> a, Vector<F> b, Vector<F> c) {
  if constexpr (sizeof(F) == sizeof(float)) {
    return (Vector<F>)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
  } else {
    return (Vector<F>)vfmaq_f64((float64x2_t)c, (float64x2_t)a, (float64x2_t)b);
  }
}

#else

template <typename F>
FASTNORM_INLINE Vector<F> multiply_add(Vector<F> a, Vector<F> b, Vector<F> c) {
  return a * b + c;
}

#endif

// 16-bit lanes to 32-bit ones and back. The compilers' own code for this is slow on x86-64.
#if defined(__x86_64__) && FASTNORM_CPU_VECTOR_BYTES == 64

FASTNORM_INLINE Words widen(Halves halves) { return (Words)_mm512_cvtepu16_epi32((__m256i)halves); }

FASTNORM_INLINE Halves narrow(Words words) { return (Halves)_mm512_cvtepi32_epi16((__m512i)words); }

#elif defined(__x86_64__) && FASTNORM_CPU_VECTOR_BYTES == 32

FASTNORM_INLINE Words widen(Halves halves) { return (Words)_mm256_cvtepu16_epi32((__m128i)halves); }

FASTNORM_INLINE Halves narrow(Words words) {
  const __m128i low = _mm256_castsi256_si128((__m256i)words);
  return (Halves)_mm_packus_epi32(low, _mm256_extracti128_si256((__m256i)words, 1));
}

#else

FASTNORM_INLINE Words widen(Halves halves) { return __builtin_convertvector(halves, Words); }

FASTNORM_INLINE Halves narrow(Words words) { return __builtin_convertvector(words, Halves); }

#endif

FASTNORM_INLINE Vector<float> load(const float* from) { return load_bits<Vector<float>>(from); }

FASTNORM_INLINE Vector<double> load(const double* from) { return load_bits<Vector<double>>(from); }

FASTNORM_INLINE Vector<float> load(const BFloat16* from) {
  return (Vector<float>)(widen(load_bits<Halves>(from)) << 16);
}

FASTNORM_INLINE void store(float* to, Vector<float> value) { store_bits(to, value); }

FASTNORM_INLINE void store(double* to, Vector<double> value) { store_bits(to, value); }

// Rounds to nearest even, into the high halves of the words. A NaN is only cut short: results of
// arithmetic are quiet NaNs, whose first fraction bit stays.
FASTNORM_INLINE Words round_to_bfloat16(Vector<float> value) {
  const Words bits = (Words)value;
  const Words is_number = (Words)(value == value);
  return bits + ((0x7fff + ((bits >> 16) & 1)) & is_number);
}

FASTNORM_INLINE void store(BFloat16* to, Vector<float> value) {
  store_bits(to, narrow(round_to_bfloat16(value) >> 16));
}

#if defined(__x86_64__) && FASTNORM_CPU_VECTOR_BYTES == 64

FASTNORM_INLINE Vector<float> load(const Float16* from) {
  return (Vector<float>)_mm512_cvtph_ps(load_bits<__m256i>(from));
}

FASTNORM_INLINE void store(Float16* to, Vector<float> value) {
  store_bits(to, _mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

#elif defined(__x86_64__) && FASTNORM_CPU_VECTOR_BYTES == 32

FASTNORM_INLINE Vector<float> load(const Float16* from) {
  return (Vector<float>)_mm256_cvtph_ps(load_bits<__m128i>(from));
}

FASTNORM_INLINE void store(Float16* to, Vector<float> value) {
  store_bits(to, _mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT));
}

#elif defined(__aarch64__)

FASTNORM_INLINE Vector<float> load(const Float16* from) {
  return (Vector<float>)vcvt_f32_f16(load_bits<float16x4_t>(from));
}

FASTNORM_INLINE void store(Float16* to, Vector<float> value) {
  store_bits(to, vcvt_f16_f32((float32x4_t)value));
}

#else

// No instruction for it: the exponent is moved by a multiplication, which also makes the
// subnormals right.
FASTNORM_INLINE Vector<float> load(const Float16* from) {
  const Words half = widen(load_bits<Halves>(from));
  const Words magnitude = half & 0x7fff;
  const float two_to_112 = 0x1p112f;
  const Words finite = (Words)((Vector<float>)(magnitude << 13) * two_to_112);
  const Words special = (magnitude << 13) | 0x7f800000;  // infinities and NaNs
  const Words is_special = (Words)(magnitude >= 0x7c00);
  return (Vector<float>)(select(is_special, special, finite) | ((half & 0x8000) << 16));
}

// Rounds to nearest even. Subnormal halves are rounded by an addition that leaves them in the low
// bits of the sum; the others by integer arithmetic, where a carry reaches infinity by itself.
FASTNORM_INLINE void store(Float16* to, Vector<float> value) {
  const Words bits = (Words)value;
  const Words magnitude = bits & 0x7fffffff;
  const float half = 0.5f;
  const Words subnormal = (Words)((Vector<float>)magnitude + half) - 0x3f000000;
  const Words normal = (magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  Words result = select((Words)(magnitude < 0x38800000), subnormal, normal);
  result = select((Words)(magnitude >= 0x47800000), Words{} + 0x7c00, result);
  result = select((Words)(magnitude > 0x7f800000), Words{} + 0x7e00, result);
  store_bits(to, narrow(result | ((bits >> 16) & 0x8000)));
}

#endif

// Two vectors' worth of columns. Where only bfloat16 is concerned, `first` holds the even columns
// and `second` the odd ones, which takes half the instructions; else they follow one another.
template <typename F>
struct Pair {
  Vector<F> first;
  Vector<F> second;
};

template <typename T>
constexpr bool kIsBFloat16 = false;
template <>
constexpr bool kIsBFloat16<BFloat16> = true;

template <bool kEvenOdd, typename T>
FASTNORM_INLINE Pair<Float<T>> load_pair(const T* from) {
  if constexpr (kEvenOdd) {
    const Words both = load_bits<Words>(from);
    return {(Vector<float>)(both << 16), (Vector<float>)(both & 0xffff0000)};
  } else {
    return {load(from), load(from + kLanes<Float<T>>)};
  }
}

template <bool kEvenOdd, typename T>
FASTNORM_INLINE void store_pair(T* to, Pair<Float<T>> values) {
  if constexpr (kEvenOdd) {
    const Words even = round_to_bfloat16(values.first) >> 16;
    store_bits(to, even | (round_to_bfloat16(values.second) & 0xffff0000));
  } else {
    store(to, values.first);
    store(to + kLanes<Float<T>>, values.second);
  }
}

template <typename F>
FASTNORM_INLINE Vector<F> masked(Vector<F> value, Bits<F> mask) {
  return (Vector<F>)((Bits<F>)value & mask);
}

// Ones in the last `count` lanes.
template <typename F>
FASTNORM_INLINE Bits<F> last_lanes(int64_t count) {
  Bits<F> lane;
  for (int64_t i = 0; i < kLanes<F>; ++i) lane[i] = i;
  return lane >= static_cast<typename VectorTypes<F>::Lane>(kLanes<F> - count);
}

template <typename F, int kDistance, int... kLane>
FASTNORM_INLINE Vector<F> swap_lanes(Vector<F> value, std::integer_sequence<int, kLane...>) {
  return __builtin_shufflevector(value, value, (kLane ^ kDistance)...);
}

// The sum of all lanes, always in the same order.
template <typename F>
FASTNORM_INLINE F sum_lanes(Vector<F> value) {
  constexpr std::make_integer_sequence<int, kLanes<F>> kAll;
  if constexpr (kLanes<F> > 8) value += swap_lanes<F, 8>(value, kAll);
  if constexpr (kLanes<F> > 4) value += swap_lanes<F, 4>(value, kAll);
  if constexpr (kLanes<F> > 2) value += swap_lanes<F, 2>(value, kAll);
  value += swap_lanes<F, 1>(value, kAll);
  return value[0];
}
