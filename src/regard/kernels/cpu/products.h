// Vectors, exponentials, matrix products and threads, for attention.cpp and linear.cpp.
//
// The code uses the vector types of GCC and Clang, so the compiler chooses the instructions. Only
// the bfloat16 product needs a specific instruction set: Intel AMX, which sums in float32.
//
// Invariant: the order of additions in a product depends only on its depth, so results are bitwise
// identical on any number of threads.
//
// Test: pytest tests/kernels/test_cpu.py -q

#pragma once

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#define AMX_BFLOAT16
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16, STRIPE = 8;
#elif defined(__AVX__)
constexpr int LANES = 8, STRIPE = 4;  // more sums do not fit 16 registers
#else
constexpr int LANES = 4, STRIPE = 8;
#endif

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));

constexpr float MIN_EXPONENT = -87.0f;  // e^x is taken as 0 for x below this

Floats load(const float *from) {
    Floats values;
    std::memcpy(&values, from, sizeof values);
    return values;
}

void store(float *to, Floats values) { std::memcpy(to, &values, sizeof values); }

// first, first + 1, first + 2, ...
Ints consecutive(int64_t first) {
    Ints values;
    for (int lane = 0; lane < LANES; ++lane) values[lane] = int32_t(first) + lane;
    return values;
}

float sum(Floats values) {
    float total = 0;
    for (int lane = 0; lane < LANES; ++lane) total += values[lane];
    return total;
}

int64_t round_up(int64_t size, int64_t step) { return (size + step - 1) / step * step; }

typedef uint16_t BFloat;

BFloat to_bfloat(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if (std::isnan(value)) return 0x7fc0;
    return BFloat((bits + 0x7fff + (bits >> 16 & 1)) >> 16);  // round to nearest, ties to even
}

// e^x = 2^n e^r for MIN_EXPONENT <= x <= 87, with |r| <= log(2) / 2. The error is about one unit in
// the last place. e^r is a minimax polynomial with an error of 3.3e-9.
Floats exponential(Floats x) {
    const Floats shifted = x * 1.44269504f + 12582912.0f;  // adding 1.5 * 2^23 rounds to an integer
    const Floats n = shifted - 12582912.0f;
    const Floats r = (x - n * 0.693145752f) - n * 1.42860677e-6f;
    Floats tail = r * 0.00138131402f + 0.0083694193f;
    tail = tail * r + 0.0416684569f;
    tail = tail * r + 0.166665148f;
    tail = tail * r + 0.499999931f;
    const Floats near = tail * (r * r) + r + 1.0f;
    return (Floats)((Ints)near + ((Ints)shifted << 23));
}

// softcap * tanh(score / softcap).
Floats soft_cap(Floats score, float softcap) {
    const Floats x = score * (1.0f / softcap), square = x * x;
    // Near 0, where 1 - e^-2x loses digits, the series of tanh.
    const Floats near = x * (1.0f - square * (1.0f / 3 - square * (2.0f / 15 - square * (
        17.0f / 315 - square * (62.0f / 2835)))));
    const Floats limit = Floats{} + 30.0f;  // where tanh is 1 in float32
    Floats size = x < 0 ? -x : x;
    size = size > limit ? limit : size;
    const Floats power = exponential(-2.0f * size), far = (1.0f - power) / (1.0f + power);
    return softcap * (square < 0.0625f ? near : x < 0 ? -far : far);
}

// ---- products ----------------------------------------------------------------------------------
// Product::run computes c [STRIPE, PANEL] = a [STRIPE, depth] b [depth, PANEL], or += if `adds`.
// The depth is a multiple of DEPTH. The instructions need each PAIR rows of b interleaved. a_row
// and c_row are the row strides.

template <class Element>
struct Product;

template <>
struct Product<float> {
    static constexpr int64_t STRIPE = ::STRIPE, PANEL = 2 * LANES, PAIR = 1, DEPTH = 1;

    static void run(const float *a, int64_t a_row, const float *b, float *c, int64_t c_row,
                    int64_t depth, bool adds) {
        Floats sums[STRIPE][2];
        for (int row = 0; row < STRIPE; ++row)
            for (int half = 0; half < 2; ++half)
                sums[row][half] = adds ? load(c + row * c_row + half * LANES) : Floats{};
        for (int64_t k = 0; k < depth; ++k) {
            const Floats left = load(b + k * PANEL), right = load(b + k * PANEL + LANES);
#pragma GCC unroll 8
            for (int row = 0; row < STRIPE; ++row) {
                const float factor = a[row * a_row + k];
                sums[row][0] += factor * left;
                sums[row][1] += factor * right;
            }
        }
        for (int row = 0; row < STRIPE; ++row)
            for (int half = 0; half < 2; ++half)
                store(c + row * c_row + half * LANES, sums[row][half]);
    }

    static float narrow(float value) { return value; }
};

#ifdef AMX_BFLOAT16
template <>
struct Product<BFloat> {
    static constexpr int64_t STRIPE = 32, PANEL = 32, PAIR = 2, DEPTH = 32;

    // Computes 2 x 2 tiles of 16 x 16 sums. A tile of a or b is 16 rows of 64 bytes.
    static void run(const BFloat *a, int64_t a_row, const BFloat *b, float *c, int64_t c_row,
                    int64_t depth, bool adds) {
        const int64_t bytes = 4 * c_row;
        if (adds) {
            _tile_loadd(0, c, bytes);
            _tile_loadd(1, c + 16, bytes);
            _tile_loadd(2, c + 16 * c_row, bytes);
            _tile_loadd(3, c + 16 * c_row + 16, bytes);
        } else {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
        }
        for (int64_t k = 0; k < depth; k += DEPTH) {
            _tile_loadd(4, a + k, 2 * a_row);
            _tile_loadd(6, b + k * PANEL, 128);
            _tile_loadd(7, b + k * PANEL + 32, 128);
            _tile_loadd(5, a + 16 * a_row + k, 2 * a_row);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, c, bytes);
        _tile_stored(1, c + 16, bytes);
        _tile_stored(2, c + 16 * c_row, bytes);
        _tile_stored(3, c + 16 * c_row + 16, bytes);
    }

    static BFloat narrow(float value) { return to_bfloat(value); }

    static void narrow(Floats values, BFloat *to) {
        const __m256bh halves = _mm512_cvtneps_pbh((__m512)values);
        std::memcpy(to, &halves, sizeof halves);
    }
};

// Configures a thread's eight tiles as 16 rows of 64 bytes; the destructor releases them.
struct TileConfig {
    TileConfig() {
        alignas(64) uint8_t shape[64] = {1};  // palette 1
        for (int tile = 0; tile < 8; ++tile) {
            shape[16 + 2 * tile] = 64;
            shape[48 + tile] = 16;
        }
        _tile_loadconfig(shape);
    }
    ~TileConfig() { _tile_release(); }
};
#endif

// Used instead of TileConfig by code without tiles.
struct NoTileConfig {};

// Copies a matrix [depth, columns] into zero-padded panels [padded_depth, PANEL] with PAIR rows
// interleaved.
template <class Element>
void pack(const Element *from, int64_t depth_step, int64_t column_step, int64_t depth,
          int64_t columns, int64_t padded_depth, Element *to) {
    using P = Product<Element>;
    std::memset(to, 0, sizeof(Element) * padded_depth * round_up(columns, P::PANEL));
    for (int64_t first = 0; first < columns; first += P::PANEL) {
        const int64_t count = std::min(P::PANEL, columns - first);
        for (int64_t k = 0; k < depth; ++k) {
            const Element *source = from + k * depth_step + first * column_step;
            Element *row = to + first * padded_depth + k / P::PAIR * P::PANEL * P::PAIR +
                           k % P::PAIR;
            for (int64_t j = 0; j < count; ++j) row[j * P::PAIR] = source[j * column_step];
        }
    }
}

// Whether a matrix has no NaN or infinity. Only NaN and infinity have all exponent bits set.
template <class Element>
bool all_finite(const Element *from, int64_t row_step, int64_t rows, int64_t columns) {
    using Bits = std::conditional_t<sizeof(Element) == 4, uint32_t, uint16_t>;
    constexpr Bits EXPONENT = sizeof(Element) == 4 ? 0x7f800000 : 0x7f80;
    Bits largest = 0;
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t column = 0; column < columns; ++column) {
            Bits bits;
            std::memcpy(&bits, from + row * row_step + column, sizeof bits);
            largest = std::max<Bits>(largest, bits & EXPONENT);
        }
    return largest < EXPONENT;
}

// ---- threads -----------------------------------------------------------------------------------

// Calls start(thread) on each thread, and the function that it returns for units from 0 to `units`.
// Each unit runs once, on the next free thread. Uses PyTorch's OpenMP threads, which spin while
// they wait, so they would compete with threads of our own.
template <class Start>
void parallel(int64_t units, int64_t threads, Start start) {
    std::atomic<int64_t> next{0};
#pragma omp parallel num_threads(int(threads)) if (threads > 1)
    {
        auto run = start(omp_get_thread_num());
        for (int64_t unit; (unit = next++) < units;) run(unit);
    }
}

}  // namespace
