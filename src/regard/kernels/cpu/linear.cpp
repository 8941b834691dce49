// y = x W^T + bias in int8: y [rows, outputs], x [rows, inputs], W [outputs, inputs].
//
// W is int8 with one scale per output. Each row of x is rounded to int8 with its own scale.
// Products are summed in int32. Decoding is limited by memory bandwidth; int8 needs a quarter of
// the bytes.
//
// regard.layers.linear.Quantized packs the weights and calls linear().
//
// Invariant: a row's result is bitwise identical in any batch and on any number of threads, because
// integer sums do not depend on their order.
//
// Weights are packed in panels of 32 outputs with four inputs interleaved, the layout of both VNNI
// (vectors) and AMX (tiles).
//
// Test: pytest tests/kernels/test_cpu.py tests/models/test_quantization.py -q

#include "products.h"

#include <vector>

#if defined(__AVX512VNNI__)
#include <immintrin.h>
#endif
#if defined(AMX_BFLOAT16) && defined(__AMX_INT8__)
#define AMX_INT8
#endif

namespace {

constexpr int64_t PANEL = 32, QUAD = 4;  // as in regard.layers.linear
constexpr int64_t ROWS_PER_PASS = 4;  // rows that share one read of the weights
constexpr int64_t MIN_TILE_ROWS = 8;  // with fewer rows, vectors are faster than tiles
constexpr int64_t MIN_PARALLEL_PRODUCTS = 1 << 18;
constexpr int PARTS = PANEL / LANES;  // vectors in a panel

typedef int8_t Bytes __attribute__((vector_size(LANES)));

// The weights of a layer. Weights in build.py has the same fields in the same order.
struct Weights {
    const int8_t *weight;            // [panels, depth / QUAD, PANEL, QUAD]
    const int32_t *sums;             // [outputs]: the sum of each output's weights
    const float *scale, *bias;       // [outputs]; the bias may be null
    int64_t inputs, outputs, depth;  // depth: inputs with padding
};

// The arguments of one call.
struct Layer : Weights {
    const float *x;  // [rows, inputs]
    float *y;        // [rows, outputs]
    int64_t rows, threads;

    const int8_t *panel(int64_t index) const { return weight + index * depth * PANEL; }
    int64_t panels() const { return round_up(outputs, PANEL) / PANEL; }
};

// The rows of x in int8 with their scales. Padding needs no value, because its weights are 0.
struct QuantizedRows {
    std::vector<int8_t> values;  // [rows, depth]
    std::vector<float> scale;
    const int8_t offset;  // added to all values

    QuantizedRows(const Layer &layer, int64_t rows, int32_t offset)
        : values(rows * layer.depth), scale(rows), offset(int8_t(offset)) {
        parallel(layer.rows, layer.rows < MIN_TILE_ROWS ? 1 : layer.threads, [&](int64_t) {
            return [&](int64_t row) { scale[row] = quantize_row(layer, row); };
        });
    }

    // Quantizes a row and returns its scale, which is NaN if an input is not finite.
    float quantize_row(const Layer &layer, int64_t row) {
        const float *x = layer.x + row * layer.inputs;
        const int64_t whole = layer.inputs / LANES * LANES;
        Ints magnitudes = {};  // as integers, infinity and NaN are the largest
        for (int64_t k = 0; k < whole; k += LANES) {
            const Ints bits = (Ints)load(x + k) & 0x7fffffff;
            magnitudes = bits > magnitudes ? bits : magnitudes;
        }
        int32_t largest = 0;
        for (int lane = 0; lane < LANES; ++lane) largest = std::max(largest, magnitudes[lane]);
        for (int64_t k = whole; k < layer.inputs; ++k) {
            int32_t bits;
            std::memcpy(&bits, x + k, 4);
            largest = std::max(largest, bits & 0x7fffffff);
        }
        float largest_value;
        std::memcpy(&largest_value, &largest, 4);
        if (!std::isfinite(largest_value)) return NAN;
        const float factor = 127 / largest_value;
        if (!std::isfinite(factor)) return 0;  // all inputs are 0 or subnormal
        int8_t *to = values.data() + row * layer.depth;
        for (int64_t k = 0; k < whole; k += LANES) {
            const Bytes rounded = __builtin_convertvector(nearest(load(x + k) * factor), Bytes);
            const Bytes shifted = rounded + offset;
            std::memcpy(to + k, &shifted, sizeof shifted);
        }
        for (int64_t k = whole; k < layer.inputs; ++k)
            to[k] = int8_t(nearest(Floats{} + x[k] * factor)[0] + offset);
        return largest_value / 127;
    }

    // Rounds to integers, ties to even, by adding 12582912 = 1.5 * 2^23.
    static Ints nearest(Floats values) {
        return __builtin_convertvector((values + 12582912.0f) - 12582912.0f, Ints);
    }
};

// Scales the sums of one row and one panel, adds the bias and writes the result to y.
void write_outputs(const Layer &layer, const int32_t *sums, float scale, int64_t row,
                   int64_t first) {
    const int64_t count = std::min(PANEL, layer.outputs - first);
    float *y = layer.y + row * layer.outputs + first;
    for (int64_t j = 0; j < count; ++j) {
        const float product = float(sums[j]) * (layer.scale[first + j] * scale);
        y[j] = layer.bias ? product + layer.bias[first + j] : product;
    }
}

Ints load_ints(const int8_t *from) {
    Ints values;
    std::memcpy(&values, from, sizeof values);
    return values;
}

void store_ints(int32_t *to, Ints values) { std::memcpy(to, &values, sizeof values); }

// Adds to each output's sum the products of four weights with the four inputs in `quads`.
#if defined(__AVX512VNNI__)
constexpr int32_t OFFSET = 128;  // the instruction takes unsigned inputs

Ints add_products(Ints sums, int32_t quads, Ints weights) {
    return (Ints)_mm512_dpbusd_epi32((__m512i)sums, _mm512_set1_epi32(quads), (__m512i)weights);
}
#else
constexpr int32_t OFFSET = 0;

Ints add_products(Ints sums, int32_t quads, Ints weights) {
    for (int byte = 0; byte < 4; ++byte) {
        const int left = 24 - 8 * byte;
        sums += (weights << left >> 24) * (quads << left >> 24);
    }
    return sums;
}
#endif

// Multiplies ROWS rows by one panel and reads its weights once.
template <int ROWS>
void multiply_with_vectors(const Layer &layer, const QuantizedRows &rows, int64_t row,
                           int64_t panel) {
    const int8_t *weight = layer.panel(panel);
    const int8_t *x = rows.values.data() + row * layer.depth;
    Ints sums[ROWS][PARTS] = {};
    for (int64_t k = 0; k < layer.depth; k += QUAD, weight += QUAD * PANEL) {
        int32_t quads[ROWS];
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) std::memcpy(quads + r, x + r * layer.depth + k, 4);
#pragma GCC unroll 8
        for (int part = 0; part < PARTS; ++part) {
            const Ints weights = load_ints(weight + part * QUAD * LANES);
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; ++r)
                sums[r][part] = add_products(sums[r][part], quads[r], weights);
        }
    }
    const int64_t first = panel * PANEL, count = std::min(PANEL, layer.outputs - first);
    int32_t row_sums[ROWS][PANEL];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
        for (int part = 0; part < PARTS; ++part)
            store_ints(row_sums[r] + part * LANES, sums[r][part]);
    for (int r = 0; r < ROWS && row + r < layer.rows; ++r) {
        for (int64_t j = 0; j < count; ++j) row_sums[r][j] -= OFFSET * layer.sums[first + j];
        write_outputs(layer, row_sums[r], rows.scale[row + r], row + r, first);
    }
}

void linear_with_vectors(const Layer &layer) {
    const int64_t padded = layer.rows == 1 ? 1 : round_up(layer.rows, ROWS_PER_PASS);
    const QuantizedRows rows(layer, padded, OFFSET);
    const bool parallelize = layer.rows * layer.depth * layer.outputs >= MIN_PARALLEL_PRODUCTS;
    parallel(layer.panels(), parallelize ? layer.threads : 1, [&](int64_t) {
        return [&](int64_t panel) {
            if (layer.rows == 1) return multiply_with_vectors<1>(layer, rows, 0, panel);
            for (int64_t row = 0; row < layer.rows; row += ROWS_PER_PASS)
                multiply_with_vectors<ROWS_PER_PASS>(layer, rows, row, panel);
        };
    });
}

#ifdef AMX_INT8
// Computes 2 x 2 tiles of 16 x 16 sums. A tile of x or of weights is 16 rows of 64 bytes.
void linear_with_tiles(const Layer &layer) {
    constexpr int64_t STRIPE = 32, DEPTH = 64;
    const QuantizedRows rows(layer, round_up(layer.rows, STRIPE), 0);
    parallel(layer.panels(), layer.threads, [&](int64_t) {
        return [&, tiles = TileConfig()](int64_t panel) {
            for (int64_t row = 0; row < layer.rows; row += STRIPE) {
                const int8_t *x = rows.values.data() + row * layer.depth;
                const int8_t *weight = layer.panel(panel);
                _tile_zero(0);
                _tile_zero(1);
                _tile_zero(2);
                _tile_zero(3);
                for (int64_t k = 0; k < layer.depth; k += DEPTH) {
                    _tile_loadd(4, x + k, layer.depth);
                    _tile_loadd(6, weight + k * PANEL, QUAD * PANEL);
                    _tile_loadd(7, weight + k * PANEL + 64, QUAD * PANEL);
                    _tile_loadd(5, x + 16 * layer.depth + k, layer.depth);
                    _tile_dpbssd(0, 4, 6);
                    _tile_dpbssd(1, 4, 7);
                    _tile_dpbssd(2, 5, 6);
                    _tile_dpbssd(3, 5, 7);
                }
                int32_t sums[STRIPE * PANEL];
                _tile_stored(0, sums, 4 * PANEL);
                _tile_stored(1, sums + 16, 4 * PANEL);
                _tile_stored(2, sums + 16 * PANEL, 4 * PANEL);
                _tile_stored(3, sums + 16 * PANEL + 16, 4 * PANEL);
                const int64_t count = std::min(STRIPE, layer.rows - row);
                for (int64_t r = 0; r < count; ++r)
                    write_outputs(layer, sums + r * PANEL, rows.scale[row + r], row + r,
                                  panel * PANEL);
            }
        };
    });
}
#endif

}  // namespace

// Computes y; uses AMX if `tiles` and there are enough rows.
extern "C" void linear(const Weights *weights, const float *x, float *y, int64_t rows,
                       int64_t threads, int tiles) {
    const Layer layer{*weights, x, y, rows, threads};
#ifdef AMX_INT8
    if (tiles && rows >= MIN_TILE_ROWS) return linear_with_tiles(layer);
#endif
    (void)tiles;
    linear_with_vectors(layer);
}
