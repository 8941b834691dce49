// y = x W^T + bias with whole numbers: weights of int8 with a scale for each output, inputs made
// int8 with a scale for each row, products summed in int32. A quarter of the bytes to read, which is
// what a decoding step waits for; and sums of whole numbers do not depend on their order, so a row
// comes out the same, bit for bit, whatever stands beside it and on however many threads.
//
// Weights lie in panels of 32 outputs, four inputs side by side: what both kinds of instructions for
// such products take, those of a vector (VNNI) and those of tiles (AMX).

#include "products.h"

#include <vector>

#if defined(__AVX512VNNI__)
#include <immintrin.h>
#endif
#if defined(TILES) && defined(__AMX_INT8__)
#define BYTE_TILES
#endif

namespace {

constexpr int64_t PANEL = 32, QUAD = 4;  // as in regard.quantizing
constexpr int64_t FEW = 4, MANY = 8;     // rows that share a reading; rows from which tiles pay
constexpr int64_t SHARED = 1 << 18;      // products that are worth a second thread
constexpr int PARTS = PANEL / LANES;

typedef int8_t Bytes __attribute__((vector_size(LANES)));

// What does not change between calls. building.py has the same fields in the same order.
struct Weights {
    const int8_t *weight;            // [panels, depth / QUAD, PANEL, QUAD]
    const int32_t *sums;             // of each output's weights [outputs]
    const float *scale, *bias;       // [outputs]; a bias may be missing
    int64_t inputs, outputs, depth;  // the depth is what the inputs are padded to
};

struct Layer : Weights {
    const float *x;  // [rows, inputs]
    float *y;        // [rows, outputs]
    int64_t rows, threads;

    const int8_t *panel(int64_t index) const { return weight + index * depth * PANEL; }
    int64_t panels() const { return up(outputs, PANEL) / PANEL; }
};

// The rows as whole numbers, and what each was divided by. Where they are padded weights are 0.
struct Rows {
    std::vector<int8_t> values;  // [rows, depth]
    std::vector<float> scale;
    const int8_t offset;  // added to all

    Rows(const Layer &layer, int64_t rows, int32_t offset)
        : values(rows * layer.depth), scale(rows), offset(int8_t(offset)) {
        parallel(layer.rows, layer.rows < MANY ? 1 : layer.threads, [&](int64_t) {
            return [&](int64_t row) { scale[row] = fill(layer, row); };
        });
    }

    float fill(const Layer &layer, int64_t row) {
        const float *x = layer.x + row * layer.inputs;
        const int64_t whole = layer.inputs / LANES * LANES;
        Ints sizes = {};  // they compare as their bits do; what is not finite is above all
        for (int64_t k = 0; k < whole; k += LANES) {
            const Ints bits = (Ints)load(x + k) & 0x7fffffff;
            sizes = bits > sizes ? bits : sizes;
        }
        int32_t largest = 0;
        for (int lane = 0; lane < LANES; ++lane) largest = std::max(largest, sizes[lane]);
        for (int64_t k = whole; k < layer.inputs; ++k) {
            int32_t bits;
            std::memcpy(&bits, x + k, 4);
            largest = std::max(largest, bits & 0x7fffffff);
        }
        float most;
        std::memcpy(&most, &largest, 4);
        if (!std::isfinite(most)) return NAN;
        const float factor = 127 / most;
        if (!std::isfinite(factor)) return 0;  // next to nothing
        int8_t *to = values.data() + row * layer.depth;
        for (int64_t k = 0; k < whole; k += LANES) {
            const Bytes found = __builtin_convertvector(nearest(load(x + k) * factor), Bytes);
            const Bytes moved = found + offset;
            std::memcpy(to + k, &moved, sizeof moved);
        }
        for (int64_t k = whole; k < layer.inputs; ++k)
            to[k] = int8_t(nearest(Floats{} + x[k] * factor)[0] + offset);
        return most / 127;
    }

    static Ints nearest(Floats values) {  // 1.5 * 2^23: rounds to a whole number, ties to even
        return __builtin_convertvector((values + 12582912.0f) - 12582912.0f, Ints);
    }
};

void finish(const Layer &layer, const int32_t *sums, float scale, int64_t row, int64_t first) {
    const int64_t count = std::min(PANEL, layer.outputs - first);
    float *y = layer.y + row * layer.outputs + first;
    for (int64_t j = 0; j < count; ++j) {
        const float product = float(sums[j]) * (layer.scale[first + j] * scale);
        y[j] = layer.bias ? product + layer.bias[first + j] : product;
    }
}

Ints load_ints(const int8_t *from) {
    Ints found;
    std::memcpy(&found, from, sizeof found);
    return found;
}

void store_ints(int32_t *to, Ints values) { std::memcpy(to, &values, sizeof values); }

#if defined(__AVX512VNNI__)
constexpr int32_t OFFSET = 128;  // the instruction takes unsigned inputs

Ints multiply(Ints sums, int32_t four, Ints weights) {
    return (Ints)_mm512_dpbusd_epi32((__m512i)sums, _mm512_set1_epi32(four), (__m512i)weights);
}
#else
constexpr int32_t OFFSET = 0;

Ints multiply(Ints sums, int32_t four, Ints weights) {
    for (int byte = 0; byte < 4; ++byte) {
        const int left = 24 - 8 * byte;
        sums += (weights << left >> 24) * (four << left >> 24);
    }
    return sums;
}
#endif

// Some rows against one panel: weights go straight from memory into the sums.
template <int ROWS>
void few(const Layer &layer, const Rows &rows, int64_t row, int64_t panel) {
    const int8_t *weight = layer.panel(panel);
    const int8_t *x = rows.values.data() + row * layer.depth;
    Ints sums[ROWS][PARTS] = {};
    for (int64_t k = 0; k < layer.depth; k += QUAD, weight += QUAD * PANEL) {
        int32_t four[ROWS];
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) std::memcpy(four + r, x + r * layer.depth + k, 4);
#pragma GCC unroll 8
        for (int part = 0; part < PARTS; ++part) {
            const Ints weights = load_ints(weight + part * QUAD * LANES);
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; ++r)
                sums[r][part] = multiply(sums[r][part], four[r], weights);
        }
    }
    const int64_t first = panel * PANEL, count = std::min(PANEL, layer.outputs - first);
    int32_t found[ROWS][PANEL];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
        for (int part = 0; part < PARTS; ++part)
            store_ints(found[r] + part * LANES, sums[r][part]);
    for (int r = 0; r < ROWS && row + r < layer.rows; ++r) {
        for (int64_t j = 0; j < count; ++j) found[r][j] -= OFFSET * layer.sums[first + j];
        finish(layer, found[r], rows.scale[row + r], row + r, first);
    }
}

void by_rows(const Layer &layer) {
    const Rows rows(layer, layer.rows == 1 ? 1 : up(layer.rows, FEW), OFFSET);
    const bool share = layer.rows * layer.depth * layer.outputs >= SHARED;
    parallel(layer.panels(), share ? layer.threads : 1, [&](int64_t) {
        return [&](int64_t panel) {
            if (layer.rows == 1) return few<1>(layer, rows, 0, panel);
            for (int64_t row = 0; row < layer.rows; row += FEW) few<FEW>(layer, rows, row, panel);
        };
    });
}

#ifdef BYTE_TILES
// 2 x 2 tiles of 16 x 16 sums; a tile of x or of weights is 16 rows of 64 bytes.
void by_tiles(const Layer &layer) {
    constexpr int64_t STRIPE = 32, DEPTH = 64;
    const Rows rows(layer, up(layer.rows, STRIPE), 0);
    parallel(layer.panels(), layer.threads, [&](int64_t) {
        return [&, tiles = Tiles()](int64_t panel) {
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
                    finish(layer, sums + r * PANEL, rows.scale[row + r], row + r, panel * PANEL);
            }
        };
    });
}
#endif

}  // namespace

extern "C" void linear(const Weights *weights, const float *x, float *y, int64_t rows,
                       int64_t threads, int tiles) {
    const Layer layer{*weights, x, y, rows, threads};
#ifdef BYTE_TILES
    if (tiles && rows >= MANY) return by_tiles(layer);
#endif
    (void)tiles;
    by_rows(layer);
}
