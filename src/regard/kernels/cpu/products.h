// Vectors, powers of e, matrix products and threads: what the kernels are made of.
//
// Vectors are those of GCC and Clang, so the compiler chooses the instructions. Only the product in
// bfloat16 is written for one machine: Intel's tiles (AMX), which multiply it into float32.

#pragma once

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#define TILES
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16, STRIPE = 8;
#elif defined(__AVX__)
constexpr int LANES = 8, STRIPE = 4;  // 16 registers hold no more sums
#else
constexpr int LANES = 4, STRIPE = 8;
#endif

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));

constexpr float LOWEST = -87.0f;  // below it a power of e is 0 for float32

Floats load(const float *from) {
    Floats found;
    std::memcpy(&found, from, sizeof found);
    return found;
}

void store(float *to, Floats values) { std::memcpy(to, &values, sizeof values); }

Ints count_from(int64_t first) {
    Ints found;
    for (int lane = 0; lane < LANES; ++lane) found[lane] = int32_t(first) + lane;
    return found;
}

float sum(Floats values) {
    float total = 0;
    for (int lane = 0; lane < LANES; ++lane) total += values[lane];
    return total;
}

int64_t up(int64_t size, int64_t step) { return (size + step - 1) / step * step; }

typedef uint16_t BFloat;

BFloat to_bfloat(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if (std::isnan(value)) return 0x7fc0;
    return BFloat((bits + 0x7fff + (bits >> 16 & 1)) >> 16);  // to the nearest, ties to even
}

// e to the power of x, LOWEST <= x <= 87: 2^n e^r with |r| <= log(2) / 2, to about one unit in the
// last place. The polynomial is the one of its degree that is off least, by 3.3e-9.
Floats power(Floats x) {
    const Floats shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: rounds to a whole number
    const Floats n = shifted - 12582912.0f;
    const Floats r = (x - n * 0.693145752f) - n * 1.42860677e-6f;
    Floats tail = r * 0.00138131402f + 0.0083694193f;
    tail = tail * r + 0.0416684569f;
    tail = tail * r + 0.166665148f;
    tail = tail * r + 0.499999931f;
    const Floats near = tail * (r * r) + r + 1.0f;
    return (Floats)((Ints)near + ((Ints)shifted << 23));
}

Floats cap(Floats score, float softcap) {
    // tanh(x) = 1 - 2 / (e^2x + 1); at 2x = 60 it is 1 in float32.
    Floats twice = score * (2.0f / softcap);
    const Floats limit = Floats{} + 60.0f;
    twice = twice > limit ? limit : twice;
    twice = twice < -limit ? -limit : twice;
    return softcap - (2.0f * softcap) / (power(twice) + 1.0f);
}

// ---- products ----------------------------------------------------------------------------------
// c [STRIPE, PANEL] = a [STRIPE, depth] b [depth, PANEL], or += where it adds. The depth is a
// multiple of DEPTH, and of b PAIR rows lie interleaved, as the machine takes them.

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

#ifdef TILES
template <>
struct Product<BFloat> {
    static constexpr int64_t STRIPE = 32, PANEL = 32, PAIR = 2, DEPTH = 32;

    // 2 x 2 tiles of 16 x 16 sums; a tile of a or b is 16 rows of 64 bytes.
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

// A thread's tiles: all eight of 16 rows of 64 bytes, given back at the end.
struct Tiles {
    Tiles() {
        alignas(64) uint8_t shape[64] = {1};  // palette 1
        for (int tile = 0; tile < 8; ++tile) {
            shape[16 + 2 * tile] = 64;
            shape[48 + tile] = 16;
        }
        _tile_loadconfig(shape);
    }
    ~Tiles() { _tile_release(); }
};
#endif

// What a thread needs that has no tiles.
struct Nothing {};

// A matrix [depth, columns] into panels of columns, zeros where it ends before the panel does.
template <class Element>
void pack(const Element *from, int64_t depth_step, int64_t column_step, int64_t depth,
          int64_t columns, int64_t padded, Element *to) {
    using P = Product<Element>;
    std::memset(to, 0, sizeof(Element) * padded * up(columns, P::PANEL));
    for (int64_t first = 0; first < columns; first += P::PANEL) {
        const int64_t count = std::min(P::PANEL, columns - first);
        for (int64_t k = 0; k < depth; ++k) {
            const Element *source = from + k * depth_step + first * column_step;
            Element *row = to + first * padded + k / P::PAIR * P::PANEL * P::PAIR + k % P::PAIR;
            for (int64_t j = 0; j < count; ++j) row[j * P::PAIR] = source[j * column_step];
        }
    }
}

// Whether a matrix holds numbers only: what is infinite or NaN has an exponent of all ones.
template <class Element>
bool finite(const Element *from, int64_t row_step, int64_t rows, int64_t columns) {
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

// Every unit once, each on the thread that is free first. Which one that is changes no number.
// OpenMP, because PyTorch has it: threads of our own would compete with its own, which wait awake.
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
