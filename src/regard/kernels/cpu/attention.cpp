// Attention that shows its weights, on the CPU.
//
// Some rows of queries at a time meet all the keys they may attend to, and their scores stay in the
// cache until everything there is to see of them is gathered:
//
//     scores = scale Q K^T, capped and biased, -inf where a row may not attend
//     powers = exp(scores - the row's highest), their total, and what the entropy needs
//     output = powers V / total
//     sums   = powers / total, added up over rows: received, and the map

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "products.h"

#ifdef TILES
#include <sys/syscall.h>
#include <unistd.h>
#endif

// One call. building.py has the same fields in the same order; what is not asked for is null.
struct Call {
    int64_t batch, heads, key_heads, queries, keys, width, value_width;
    int64_t threads;
    int64_t chunks;  // of rows that one thread takes at a time, whatever the number of threads
    int64_t map_rows, map_columns, kept_rows, pair_count, top;
    float scale, softcap;  // a softcap of 0 is none
    const void *query, *key, *value;
    int64_t query_strides[3], key_strides[3], value_strides[3];  // batch, head, row; last is 1
    const int32_t *low, *high;    // [batch, queries]: a query attends to the keys low <= j < high
    const float *bias;            // [heads, bias_length]: what a score gets for its distance
    int64_t bias_length;          // queries - 1 + keys, and as many more as a vector reads past
    void *output;                 // [batch, heads, queries, value_width]
    float *lse, *entropy, *peak, *highest, *distance;  // [batch, heads, queries]
    float *received;              // [batch, heads, chunks, keys]
    float *map, *map_peak;        // [batch, heads, map_rows, map_columns]: sums, not averages
    const int32_t *places;        // [queries]: the place of a row among those kept, or -1
    float *kept;                  // [batch, heads, kept_rows, keys]
    const int32_t *pair_first;    // [queries + 1]: where the pairs of each query begin
    const int32_t *pair_keys;     // [pair_count], in order of the queries
    float *pairs;                 // [batch, heads, pair_count]
    float *top_weights;           // [batch, heads, queries, top]
    int64_t *top_keys;
    char *packed_keys, *packed_values, *scratch;  // room, as large as sizes() says
};

namespace {

constexpr int64_t TILE = 128;              // keys whose scores are made and looked at while near
constexpr int64_t BLOCK = 1 << 17;         // scores of a block of rows, about: a core's cache
constexpr int64_t FEWEST = 32, MOST = 64;  // rows of a block

// One head of a tensor.
template <class Element>
const Element *matrix(const void *tensor, const int64_t *strides, int64_t sequence, int64_t head) {
    return static_cast<const Element *>(tensor) + sequence * strides[0] + head * strides[1];
}

// ---- one thread's work -------------------------------------------------------------------------

// How much room a call needs; everything is padded to whole panels and stripes.
template <class Element>
struct Sizes {
    using P = Product<Element>;
    static constexpr bool IN_PLACE = sizeof(Element) == sizeof(float);  // powers: where scores were
    int64_t depth, keys, value_width, row, power_row, rows;  // rows of scores and powers; a block

    explicit Sizes(const Call &call)
        : depth(up(call.width, P::DEPTH)),
          keys(up(call.keys, P::PANEL)),
          value_width(up(call.value_width, P::PANEL)),
          row(keys + LANES),  // no power of two: rows would share their places in the cache
          power_row(IN_PLACE ? row : keys + 32),
          rows(up(std::clamp(BLOCK / keys, FEWEST, MOST), FEWEST)) {}

    int64_t key_head() const { return keys * depth * sizeof(Element); }
    int64_t value_head() const { return keys * value_width * sizeof(Element); }
    int64_t scratch() const {
        const int64_t floats = rows * (row + value_width) + 2 * row;
        const int64_t elements = rows * (depth + (IN_PLACE ? 0 : power_row));
        return up(sizeof(float) * floats + sizeof(Element) * elements, 64) + 6 * 64;
    }
};

template <class Element>
class Worker {
    using P = Product<Element>;
    static constexpr bool IN_PLACE = Sizes<Element>::IN_PLACE;

  public:
    Worker(const Call &call, int64_t thread) : call(call), size(call) {
        char *at = call.scratch + thread * size.scratch();
        scores = take<float>(at, size.rows * size.row);
        outputs = take<float>(at, size.rows * size.value_width);
        sums = take<float>(at, size.row);
        peaks = take<float>(at, size.row);
        queries = take<Element>(at, size.rows * size.depth);
        if constexpr (IN_PLACE) powers = scores;
        else powers = take<Element>(at, size.rows * size.power_row);
    }

    // A chunk holds whole bins of the map, so nobody else adds to its cells.
    void chunk(int64_t unit) {
        const int64_t part = unit % call.chunks;
        head = unit / call.chunks;  // of all sequences
        const int64_t sequence = head / call.heads, group = call.heads / call.key_heads;
        const int64_t key_head = sequence * call.key_heads + head % call.heads / group;
        low = call.low + sequence * call.queries;
        high = call.high + sequence * call.queries;
        query = matrix<Element>(call.query, call.query_strides, sequence, head % call.heads);
        keys = reinterpret_cast<Element *>(call.packed_keys + key_head * size.key_head());
        values = reinterpret_cast<Element *>(call.packed_values + key_head * size.value_head());
        received = call.received ? call.received + unit * call.keys : nullptr;
        pools = call.received || call.map;

        const int64_t bins = call.map ? call.map_rows : call.chunks;
        int64_t bin = part * bins / call.chunks;
        const int64_t last_bin = (part + 1) * bins / call.chunks;
        clear();
        for (int64_t at = edge(bin, call.queries, bins); bin < last_bin;) {
            first = at;
            count = std::min(size.rows, edge(last_bin, call.queries, bins) - first);
            if (reach()) attend();
            else lose();
            for (int64_t stop = first + count; at < stop;) {
                const int64_t end = edge(bin + 1, call.queries, bins);
                pool(at, std::min(end, stop));
                at = std::min(end, stop);
                if (at == end) flush(bin++);
            }
        }
    }

  private:
    const Call &call;
    const Sizes<Element> size;
    float *scores, *outputs, *sums, *peaks;  // [rows, row], [rows, value width], [row] twice
    Element *queries, *powers;  // [rows, depth], [rows, power_row]

    // The head at hand, the block of rows at hand, and the keys that matter to it.
    int64_t head, first, count, start, width, from, to;
    const int32_t *low, *high;
    const Element *query, *keys, *values;
    float *received;
    bool pools;
    float inverse[MOST];
    std::vector<std::pair<float, int64_t>> best;

    template <class Type>
    static Type *take(char *&at, int64_t length) {
        Type *found = reinterpret_cast<Type *>(at);
        at += up(length * sizeof(Type), 64);
        return found;
    }

    // Where bin number `bin` begins: bins spread evenly, as seeing.bins has them.
    static int64_t edge(int64_t bin, int64_t length, int64_t bins) {
        return (bin * length + bins - 1) / bins;
    }

    // The keys that some row of the block may attend to, in whole panels; whether there are any.
    bool reach() {
        start = call.keys;
        int64_t stop = 0;
        for (int64_t row = first; row < first + count; ++row) {
            if (low[row] >= high[row]) continue;
            start = std::min<int64_t>(start, low[row]);
            stop = std::max<int64_t>(stop, high[row]);
        }
        start = start / P::PANEL * P::PANEL;
        width = std::max<int64_t>(0, up(stop, P::PANEL) - start);
        return width > 0;
    }

    void attend() {
        const int64_t rows = up(count, P::STRIPE);
        std::memset(queries, 0, sizeof(Element) * rows * size.depth);
        for (int64_t row = 0; row < count; ++row)
            std::memcpy(queries + row * size.depth, query + (first + row) * call.query_strides[2],
                        sizeof(Element) * call.width);

        float highest[MOST];
        std::fill_n(highest, count, -INFINITY);
        for (int64_t tile = 0; tile < width; tile += TILE) {
            const int64_t stop = std::min(tile + TILE, width);
            for (int64_t panel = tile; panel < stop; panel += P::PANEL)
                for (int64_t row = 0; row < rows; row += P::STRIPE)
                    P::run(queries + row * size.depth, size.depth,
                           keys + (start + panel) * size.depth, scores + row * size.row + panel,
                           size.row, size.depth, false);
            for (int64_t row = 0; row < count; ++row)
                highest[row] = std::max(highest[row], prepare(row, tile, stop));
        }
        for (int64_t row = 0; row < count; ++row) soften(row, highest[row]);
        for (int64_t tile = 0; tile < width; tile += 2 * TILE)
            for (int64_t panel = 0; panel < size.value_width; panel += P::PANEL)
                for (int64_t row = 0; row < rows; row += P::STRIPE)
                    P::run(powers + row * size.power_row + tile, size.power_row,
                           values + panel * size.keys + (start + tile) * P::PANEL,
                           outputs + row * size.value_width + panel, size.value_width,
                           std::min(2 * TILE, width - tile), tile > 0);
        for (int64_t row = 0; row < count; ++row) write(row);
    }

    // Products become scores; returns the highest. Where the row may not attend they are -inf.
    float prepare(int64_t row, int64_t tile, int64_t stop) {
        float *at = scores + row * size.row;
        const int64_t index = first + row;
        const int32_t begin = low[index], end = high[index];
        const bool open = begin <= start + tile && start + stop <= end;
        const float scale = call.scale, softcap = call.softcap;
        const float *bias = call.bias;
        if (bias) bias += head % call.heads * call.bias_length + call.queries - 1 - index + start;
        const Floats closed = Floats{} - INFINITY;
        Floats highest = closed;
        for (int64_t j = tile; j < stop; j += LANES) {
            Floats score = load(at + j) * scale;
            if (softcap > 0) score = cap(score, softcap);
            if (bias) score += load(bias + j);
            if (!open) {
                const Ints key = count_from(start + j);
                score = (key >= begin) & (key < end) ? score : closed;
            }
            store(at + j, score);
            highest = score > highest ? score : highest;
        }
        float found = highest[0];
        for (int lane = 1; lane < LANES; ++lane) found = std::max(found, highest[lane]);
        return found;
    }

    // Scores become powers, and the row's fields are written.
    void soften(int64_t row, float highest) {
        float *const at = scores + row * size.row;
        Element *const narrowed = powers + row * size.power_row;
        const int64_t stop = width;
        const float taken = highest == -INFINITY ? 0 : highest;
        if (call.top) choose(row, at);
        Floats total = {}, energy = {};
        const Floats lowest = Floats{} + LOWEST;
        for (int64_t j = 0; j < stop; j += LANES) {
            Floats score = load(at + j) - taken;
            const Ints gone = score < lowest;
            score = gone ? lowest : score;
            const Floats found = gone ? Floats{} : power(score);
            total += found;
            energy += score * found;
            store(at + j, found);
            if constexpr (!IN_PLACE) P::narrow(found, narrowed + j);
        }
        const float whole = sum(total);
        inverse[row] = whole == 0 ? 0 : 1 / whole;
        const float entropy = whole == 0 ? 0 : std::log(whole) - sum(energy) * inverse[row];
        const int64_t place = head * call.queries + first + row;
        if (call.highest) call.highest[place] = highest;
        if (call.lse) call.lse[place] = highest + (whole == 0 ? 0 : std::log(whole));
        if (call.peak) call.peak[place] = inverse[row];  // the highest score's power is 1
        if (call.entropy) call.entropy[place] = entropy < 0 ? 0 : entropy;
        if (call.distance) call.distance[place] = mean_distance(row) * inverse[row];
        pick(row, at);
        for (size_t rank = 0; rank < best.size(); ++rank) {
            const int64_t to = place * call.top + rank;
            call.top_weights[to] = std::exp(best[rank].first - taken) * inverse[row];
            call.top_keys[to] = best[rank].second;
        }
    }

    // The row's highest scores and their keys, highest first: a heap whose front is the least.
    void choose(int64_t row, const float *at) {
        const auto higher = [](const auto &a, const auto &b) { return a.first > b.first; };
        best.clear();
        for (int64_t key = low[first + row]; key < high[first + row]; ++key) {
            const std::pair<float, int64_t> found{at[key - start], key};
            if (int64_t(best.size()) < call.top) {
                best.push_back(found);
            } else if (found.first > best.front().first) {
                std::pop_heap(best.begin(), best.end(), higher);
                best.back() = found;
            } else {
                continue;
            }
            std::push_heap(best.begin(), best.end(), higher);
        }
        std::sort_heap(best.begin(), best.end(), higher);
    }

    // Single weights that were asked for: whole rows, and pairs.
    void pick(int64_t row, const float *at) const {
        const int64_t index = first + row;
        if (call.kept && call.places[index] >= 0) {
            float *kept = call.kept + (head * call.kept_rows + call.places[index]) * call.keys;
            for (int64_t j = 0; j < std::min(width, call.keys - start); ++j)
                kept[start + j] = at[j] * inverse[row];
        }
        if (call.pairs)
            for (int64_t pair = call.pair_first[index]; pair < call.pair_first[index + 1]; ++pair) {
                const int64_t j = call.pair_keys[pair] - start;
                if (0 <= j && j < width)
                    call.pairs[head * call.pair_count + pair] = at[j] * inverse[row];
            }
    }

    float mean_distance(int64_t row) const {
        const int32_t position = int32_t(first + row + call.keys - call.queries);
        Floats total = {};
        for (int64_t j = 0; j < width; j += LANES) {
            const Ints apart = count_from(start + j) - position;
            const Floats distance = __builtin_convertvector(apart < 0 ? -apart : apart, Floats);
            total += distance * load(scores + row * size.row + j);
        }
        return sum(total);
    }

    void write(int64_t row) const {
        const int64_t place = head * call.queries + first + row;
        Element *output = static_cast<Element *>(call.output) + place * call.value_width;
        for (int64_t j = 0; j < call.value_width; ++j)
            output[j] = P::narrow(outputs[row * size.value_width + j] * inverse[row]);
    }

    // Rows that have nothing to attend to.
    void lose() {
        start = width = 0;
        std::fill_n(outputs, count * size.value_width, 0.0f);
        for (int64_t row = 0; row < count; ++row) {
            soften(row, -INFINITY);
            write(row);
        }
    }

    // ---- sums over rows ----

    void clear() {
        std::fill_n(sums, size.row, 0.0f);
        std::fill_n(peaks, size.row, 0.0f);
        from = call.keys, to = 0;  // the keys that were added to
    }

    // Adds the weights of some rows of the block to the sums of each key.
    void pool(int64_t begin, int64_t end) {
        if (!pools || width == 0) return;
        from = std::min(from, start);
        to = std::max(to, std::min(start + width, call.keys));
        for (int64_t j = 0; j < width; j += 2 * LANES) {
            Floats left = {}, right = {}, left_peak = {}, right_peak = {};
            for (int64_t row = begin - first; row < end - first; ++row) {
                const float *at = scores + row * size.row + j;
                const Floats a = load(at) * inverse[row], b = load(at + LANES) * inverse[row];
                left += a;
                right += b;
                if (call.map_peak) {
                    left_peak = a > left_peak ? a : left_peak;
                    right_peak = b > right_peak ? b : right_peak;
                }
            }
            float *sum_at = sums + start + j, *peak_at = peaks + start + j;
            store(sum_at, load(sum_at) + left);
            store(sum_at + LANES, load(sum_at + LANES) + right);
            if (call.map_peak)
                for (int lane = 0; lane < LANES; ++lane) {
                    peak_at[lane] = std::max(peak_at[lane], left_peak[lane]);
                    peak_at[LANES + lane] = std::max(peak_at[LANES + lane], right_peak[lane]);
                }
        }
    }

    // A bin of rows is done: its sums go into its row of the map, and to what keys receive.
    void flush(int64_t bin) {
        if (!pools) return;
        if (received)
            for (int64_t j = from; j < to; ++j) received[j] += sums[j];
        if (call.map) {
            const int64_t columns = call.map_columns, row = head * call.map_rows + bin;
            for (int64_t column = from * columns / call.keys; column < columns; ++column) {
                const int64_t begin = std::max(from, edge(column, call.keys, columns));
                const int64_t end = std::min(to, edge(column + 1, call.keys, columns));
                if (begin >= end) break;
                float total = 0, largest = 0;
                for (int64_t j = begin; j < end; ++j) {
                    total += sums[j];
                    largest = std::max(largest, peaks[j]);
                }
                call.map[row * columns + column] = total;
                if (call.map_peak) call.map_peak[row * columns + column] = largest;
            }
        }
        clear();
    }
};

// ---- all threads -------------------------------------------------------------------------------

// Packs keys and values, then attends. Returns whether all inputs are finite; if not,
// it stops there.
template <class Element, class PerThread>
bool attend(const Call &call) {
    const Sizes<Element> size(call);
    const int64_t group = call.heads / call.key_heads;
    std::atomic<bool> sound{true};
    parallel(call.batch * call.key_heads, call.threads, [&](int64_t) {
        return [&](int64_t unit) {
            const int64_t sequence = unit / call.key_heads, head = unit % call.key_heads;
            const int64_t *q = call.query_strides, *k = call.key_strides, *v = call.value_strides;
            const Element *key = matrix<Element>(call.key, k, sequence, head);
            const Element *value = matrix<Element>(call.value, v, sequence, head);
            bool all = finite(key, k[2], call.keys, call.width) &&
                       finite(value, v[2], call.keys, call.value_width);
            for (int64_t one = head * group; one < (head + 1) * group; ++one)
                all = all && finite(matrix<Element>(call.query, q, sequence, one), q[2],
                                    call.queries, call.width);
            if (!all) sound = false;
            pack(key, 1, k[2], call.width, call.keys, size.depth,
                 reinterpret_cast<Element *>(call.packed_keys + unit * size.key_head()));
            pack(value, v[2], 1, call.keys, call.value_width, size.keys,
                 reinterpret_cast<Element *>(call.packed_values + unit * size.value_head()));
        };
    });
    if (!sound) return false;
    const int64_t units = call.batch * call.heads * call.chunks;
    parallel(units, call.threads, [&](int64_t thread) {
        // The last rows of a causal call are the longest: they go first.
        return [tiles = PerThread(), worker = Worker<Element>(call, thread), units](
                   int64_t unit) mutable { worker.chunk(units - 1 - unit); };
    });
    return true;
}

template <class Element>
void measure(const Call &call, int64_t *bytes) {
    const Sizes<Element> size(call);
    bytes[0] = call.batch * call.key_heads * size.key_head();
    bytes[1] = call.batch * call.key_heads * size.value_head();
    bytes[2] = call.threads * size.scratch();
}

}  // namespace

extern "C" {

// Whether this machine multiplies bfloat16 in tiles, and its system lets us.
int has_tiles() {
#ifdef TILES
    constexpr long ASK = 0x1023, TILE_DATA = 18;  // arch_prctl: ARCH_REQ_XCOMP_PERM, XTILEDATA
    return syscall(SYS_arch_prctl, ASK, TILE_DATA) == 0;
#else
    return 0;
#endif
}

// The bytes of room for packed keys, packed values and scratch.
void sizes(const Call *call, int bfloat16, int64_t *bytes) {
#ifdef TILES
    if (bfloat16) return measure<BFloat>(*call, bytes);
#endif
    (void)bfloat16;
    measure<float>(*call, bytes);
}

// Whether it was done: an input that is not finite is left to others.
int run(const Call *call, int bfloat16) {
#ifdef TILES
    if (bfloat16) return attend<BFloat, Tiles>(*call);
#endif
    (void)bfloat16;
    return attend<float, Nothing>(*call);
}
}
