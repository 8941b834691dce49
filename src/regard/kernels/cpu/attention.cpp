// Attention with the statistics of its weights, on the CPU.
//
//     scores       = scale Q K^T, capped and biased, -inf where a row may not attend
//     exponentials = exp(scores - the highest score of the row)
//     output       = exponentials V / total, where total is their sum over the keys of a row
//     weights      = exponentials / total
//
// The fields (entropy, peak, distance and its variance, single weights, received, map) come from the weights.
//
//     Q [batch, heads, queries, width]            V      [batch, key_heads, keys, value_width]
//     K [batch, key_heads, keys, width]           output [batch, heads, queries, value_width]
//
// in float32, or in bfloat16 on machines with AMX. A thread computes one block of rows at a time.
// The scores of the block stay in the core's cache until all fields are written.
//
// regard.mechanism.backends.cpu allocates buffers of the sizes from attention_buffers() and calls
// attention().
//
// Invariants:
// - Results are bitwise identical on any number of threads: the chunks do not depend on the number
//   of threads, and no two threads add to the same number.
// - attention() refuses inputs that are not finite: a masked key has weight 0, and 0 times infinity
//   is NaN.
//
// Test: pytest tests/kernels/test_cpu.py -q

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "products.h"

#ifdef AMX_BFLOAT16
#include <sys/syscall.h>
#include <unistd.h>
#endif

// The arguments of one call. Task in build.py has the same fields in the same order. Pointers of
// fields that are not requested are null.
struct Task {
    int64_t batch, heads, key_heads, queries, keys, width, value_width;
    int64_t threads;
    int64_t chunks;  // parts of a head's rows; one thread computes a whole chunk
    int64_t map_rows, map_columns, kept_rows, pair_count, top;
    float scale, softcap;  // softcap 0: no softcap
    const float *sinks;           // [heads], or null: a score without a value in each softmax
    const void *query, *key, *value;  // the last axis is contiguous
    int64_t query_strides[3], key_strides[3], value_strides[3];  // batch, head, row
    const int32_t *low, *high;    // [batch, queries]: a query attends to the keys low <= j < high
    const int32_t *starts;        // [batch]: the position of the first query
    const float *bias;            // [bias_heads, bias_length]: the bias of each distance
    int64_t bias_heads;           // heads, or batch * heads
    int64_t bias_length;          // queries - 1 + keys + padding to whole vectors
    void *output;                 // [batch, heads, queries, value_width]
    float *lse, *entropy, *peak, *highest, *distance, *distance_variance;  // [batch, heads, queries]
    float *received;              // [batch, heads, chunks, keys]
    float *map, *map_peak;        // [batch, heads, map_rows, map_columns]: sums; maxima
    const int32_t *places;        // [queries]: the index of a row in `kept`, or -1
    float *kept;                  // [batch, heads, kept_rows, keys]: whole rows of weights
    const int32_t *pair_first;    // [queries + 1]: the index of each query's first pair
    const int32_t *pair_keys;     // [pair_count], sorted by query
    float *pairs;                 // [batch, heads, pair_count]
    float *top_weights;           // [batch, heads, queries, top]
    int64_t *top_keys;
    char *packed_keys, *packed_values, *scratch;  // sizes: see attention_buffers()
};

namespace {

constexpr int64_t KEY_TILE = 128;           // keys of a tile; its scores stay in the cache
constexpr int64_t BLOCK_SCORES = 1 << 17;   // scores of a block of rows; they fit a core's cache
constexpr int64_t MIN_BLOCK_ROWS = 32, MAX_BLOCK_ROWS = 64;

// One head of a tensor.
template <class Element>
const Element *head_matrix(const void *tensor, const int64_t *strides, int64_t sequence,
                           int64_t head) {
    return static_cast<const Element *>(tensor) + sequence * strides[0] + head * strides[1];
}

// ---- the work of one thread ---------------------------------------------------------------------

// The padded sizes and strides of the buffers, in whole panels and stripes of Product. IN_PLACE:
// exponentials overwrite scores.
template <class Element>
struct Layout {
    using P = Product<Element>;
    static constexpr bool IN_PLACE = sizeof(Element) == sizeof(float);
    int64_t depth, keys, value_width, score_stride, exponential_stride, block_rows;

    explicit Layout(const Task &task)
        : depth(round_up(task.width, P::DEPTH)),
          keys(round_up(task.keys, P::PANEL)),
          value_width(round_up(task.value_width, P::PANEL)),
          score_stride(keys + LANES),  // not a power of two: rows use different cache sets
          exponential_stride(IN_PLACE ? score_stride : keys + 32),
          block_rows(round_up(std::clamp(BLOCK_SCORES / keys, MIN_BLOCK_ROWS, MAX_BLOCK_ROWS),
                              MIN_BLOCK_ROWS)) {}

    // The bytes of one head of packed keys, one head of packed values, and one thread's scratch.
    int64_t key_head() const { return keys * depth * sizeof(Element); }
    int64_t value_head() const { return keys * value_width * sizeof(Element); }
    int64_t scratch() const {
        const int64_t floats = block_rows * (score_stride + value_width) + 2 * score_stride;
        const int64_t elements = block_rows * (depth + (IN_PLACE ? 0 : exponential_stride));
        return round_up(sizeof(float) * floats + sizeof(Element) * elements, 64) + 6 * 64;
    }
};

template <class Element>
class Worker {
    using P = Product<Element>;
    static constexpr bool IN_PLACE = Layout<Element>::IN_PLACE;

  public:
    Worker(const Task &task, int64_t thread) : task(task), layout(task) {
        char *at = task.scratch + thread * layout.scratch();
        scores = take<float>(at, layout.block_rows * layout.score_stride);
        outputs = take<float>(at, layout.block_rows * layout.value_width);
        sums = take<float>(at, layout.score_stride);
        peaks = take<float>(at, layout.score_stride);
        queries = take<Element>(at, layout.block_rows * layout.depth);
        if constexpr (IN_PLACE) exponentials = scores;
        else exponentials = take<Element>(at, layout.block_rows * layout.exponential_stride);
    }

    // Computes all fields of the rows of chunk `unit` of [batch, heads, chunks]. A chunk contains
    // whole bins of the map, so no other thread adds to their cells.
    void compute_chunk(int64_t unit) {
        const int64_t part = unit % task.chunks;
        head = unit / task.chunks;  // index into [batch, heads]
        const int64_t sequence = head / task.heads, group = task.heads / task.key_heads;
        const int64_t key_head = sequence * task.key_heads + head % task.heads / group;
        low = task.low + sequence * task.queries;
        high = task.high + sequence * task.queries;
        query = head_matrix<Element>(task.query, task.query_strides, sequence, head % task.heads);
        keys = reinterpret_cast<Element *>(task.packed_keys + key_head * layout.key_head());
        values = reinterpret_cast<Element *>(task.packed_values + key_head * layout.value_head());
        received = task.received ? task.received + unit * task.keys : nullptr;
        needs_sums = task.received || task.map;

        const int64_t bins = task.map ? task.map_rows : task.chunks;
        int64_t bin = part * bins / task.chunks;
        const int64_t last_bin = (part + 1) * bins / task.chunks;
        clear_sums();
        for (int64_t at = bin_start(bin, task.queries, bins); bin < last_bin;) {
            first_row = at;
            row_count = std::min(layout.block_rows,
                                 bin_start(last_bin, task.queries, bins) - first_row);
            if (find_key_range()) attend();
            else write_empty_rows();
            for (int64_t stop = first_row + row_count; at < stop;) {
                const int64_t end = bin_start(bin + 1, task.queries, bins);
                add_to_sums(at, std::min(end, stop));
                at = std::min(end, stop);
                if (at == end) finish_bin(bin++);
            }
        }
    }

  private:
    const Task &task;
    const Layout<Element> layout;
    float *scores, *outputs;  // [block_rows, score_stride], [block_rows, value_width]
    float *sums, *peaks;      // [score_stride]: sum and maximum of the current bin, by key
    Element *queries, *exponentials;  // [block_rows, depth], [block_rows, exponential_stride]

    // The current head, its block of rows, the block's keys, and the range of keys in `sums`.
    int64_t head, first_row, row_count, first_key, key_count, summed_from, summed_to;
    const int32_t *low, *high;
    const Element *query, *keys, *values;
    float *received;
    bool needs_sums;
    float inverse[MAX_BLOCK_ROWS];  // 1 / total of each row, 0 for rows without keys
    std::vector<std::pair<float, int64_t>> top_scores;

    template <class Type>
    static Type *take(char *&at, int64_t length) {
        Type *buffer = reinterpret_cast<Type *>(at);
        at += round_up(length * sizeof(Type), 64);
        return buffer;
    }

    // The first index in a bin. Index i is in bin i * bins / length, as in plan.bins.
    static int64_t bin_start(int64_t bin, int64_t length, int64_t bins) {
        return (bin * length + bins - 1) / bins;
    }

    // Sets the range of keys that any row of the block may attend to, rounded to whole panels.
    // Returns whether the range has keys.
    bool find_key_range() {
        first_key = task.keys;
        int64_t stop = 0;
        for (int64_t row = first_row; row < first_row + row_count; ++row) {
            if (low[row] >= high[row]) continue;
            first_key = std::min<int64_t>(first_key, low[row]);
            stop = std::max<int64_t>(stop, high[row]);
        }
        first_key = first_key / P::PANEL * P::PANEL;
        key_count = std::max<int64_t>(0, round_up(stop, P::PANEL) - first_key);
        return key_count > 0;
    }

    // Computes the block's scores, statistics and outputs.
    void attend() {
        const int64_t rows = round_up(row_count, P::STRIPE);
        std::memset(queries, 0, sizeof(Element) * rows * layout.depth);
        for (int64_t row = 0; row < row_count; ++row)
            std::memcpy(queries + row * layout.depth,
                        query + (first_row + row) * task.query_strides[2],
                        sizeof(Element) * task.width);

        float highest[MAX_BLOCK_ROWS];
        std::fill_n(highest, row_count, -INFINITY);
        for (int64_t tile = 0; tile < key_count; tile += KEY_TILE) {
            const int64_t stop = std::min(tile + KEY_TILE, key_count);
            for (int64_t panel = tile; panel < stop; panel += P::PANEL)
                for (int64_t row = 0; row < rows; row += P::STRIPE)
                    P::run(queries + row * layout.depth, layout.depth,
                           keys + (first_key + panel) * layout.depth,
                           scores + row * layout.score_stride + panel, layout.score_stride,
                           layout.depth, false);
            for (int64_t row = 0; row < row_count; ++row)
                highest[row] = std::max(highest[row], finish_scores(row, tile, stop));
        }
        for (int64_t row = 0; row < row_count; ++row) softmax_row(row, highest[row]);
        for (int64_t tile = 0; tile < key_count; tile += 2 * KEY_TILE)
            for (int64_t panel = 0; panel < layout.value_width; panel += P::PANEL)
                for (int64_t row = 0; row < rows; row += P::STRIPE)
                    P::run(exponentials + row * layout.exponential_stride + tile,
                           layout.exponential_stride,
                           values + panel * layout.keys + (first_key + tile) * P::PANEL,
                           outputs + row * layout.value_width + panel, layout.value_width,
                           std::min(2 * KEY_TILE, key_count - tile), tile > 0);
        for (int64_t row = 0; row < row_count; ++row) write_output(row);
    }

    // Applies scale, softcap, bias and mask to a row's products in a tile. Returns the maximum.
    float finish_scores(int64_t row, int64_t tile, int64_t stop) {
        float *at = scores + row * layout.score_stride;
        const int64_t index = first_row + row;
        const int32_t begin = low[index], end = high[index];
        const bool unmasked = begin <= first_key + tile && first_key + stop <= end;
        const float scale = task.scale, softcap = task.softcap;
        const float *bias = task.bias;
        if (bias)
            bias += head % task.bias_heads * task.bias_length + task.queries - 1 - index + first_key;
        const Floats masked = Floats{} - INFINITY;
        Floats highest = masked;
        for (int64_t j = tile; j < stop; j += LANES) {
            Floats score = load(at + j) * scale;
            if (softcap > 0) score = soft_cap(score, softcap);
            if (bias) score += load(bias + j);
            if (!unmasked) {
                const Ints key = consecutive(first_key + j);
                score = (key >= begin) & (key < end) ? score : masked;
            }
            store(at + j, score);
            highest = score > highest ? score : highest;
        }
        float row_highest = highest[0];
        for (int lane = 1; lane < LANES; ++lane) row_highest = std::max(row_highest, highest[lane]);
        return row_highest;
    }

    // Replaces the scores of a row by exponentials and writes the fields of this query.
    void softmax_row(int64_t row, float highest) {
        float *const at = scores + row * layout.score_stride;
        Element *const narrowed = exponentials + row * layout.exponential_stride;
        const int64_t stop = key_count;
        const bool empty = highest == -INFINITY;
        const float sink = task.sinks ? task.sinks[head % task.heads] : -INFINITY;
        const float shift = empty ? 0 : std::max(highest, sink);
        if (task.top) select_top(row, at);
        Floats total = {}, energy = {};
        const Floats lowest = Floats{} + MIN_EXPONENT;
        for (int64_t j = 0; j < stop; j += LANES) {
            Floats score = load(at + j) - shift;
            const Ints underflows = score < lowest;
            score = underflows ? lowest : score;
            const Floats weight = underflows ? Floats{} : exponential(score);
            total += weight;
            energy += score * weight;
            store(at + j, weight);
            if constexpr (!IN_PLACE) P::narrow(weight, narrowed + j);
        }
        const float sink_power = empty || !task.sinks ? 0 : std::exp(sink - shift);
        const float sink_energy = sink_power == 0 ? 0 : sink_power * (sink - shift);
        const float row_total = sum(total) + sink_power;
        inverse[row] = empty ? 0 : 1 / row_total;
        const float entropy =
            empty ? 0 : std::log(row_total) - (sum(energy) + sink_energy) * inverse[row];
        const int64_t index = head * task.queries + first_row + row;
        if (task.highest) task.highest[index] = highest;
        if (task.lse) task.lse[index] = empty ? -INFINITY : shift + std::log(row_total);
        if (task.peak) task.peak[index] = std::exp(highest - shift) * inverse[row];
        if (task.entropy) task.entropy[index] = entropy < 0 ? 0 : entropy;
        if (task.distance || task.distance_variance) {
            const float mean = summed_distance(row) * inverse[row];
            if (task.distance) task.distance[index] = mean;
            if (task.distance_variance)
                task.distance_variance[index] =
                    (summed_deviation(row, mean) + sink_power * mean * mean) * inverse[row];
        }
        write_requested(row, at);
        for (size_t rank = 0; rank < top_scores.size(); ++rank) {
            const int64_t entry = index * task.top + rank;
            task.top_weights[entry] = std::exp(top_scores[rank].first - shift) * inverse[row];
            task.top_keys[entry] = top_scores[rank].second;
        }
    }

    // Sets top_scores to the row's highest scores and their keys, highest first. During the search
    // top_scores is a heap with the lowest score at the front.
    void select_top(int64_t row, const float *at) {
        const auto higher = [](const auto &a, const auto &b) { return a.first > b.first; };
        top_scores.clear();
        for (int64_t key = low[first_row + row]; key < high[first_row + row]; ++key) {
            const std::pair<float, int64_t> candidate{at[key - first_key], key};
            if (int64_t(top_scores.size()) < task.top) {
                top_scores.push_back(candidate);
            } else if (candidate.first > top_scores.front().first) {
                std::pop_heap(top_scores.begin(), top_scores.end(), higher);
                top_scores.back() = candidate;
            } else {
                continue;
            }
            std::push_heap(top_scores.begin(), top_scores.end(), higher);
        }
        std::sort_heap(top_scores.begin(), top_scores.end(), higher);
    }

    // Writes the requested single weights: whole rows and pairs.
    void write_requested(int64_t row, const float *at) const {
        const int64_t index = first_row + row;
        if (task.kept && task.places[index] >= 0) {
            float *kept = task.kept + (head * task.kept_rows + task.places[index]) * task.keys;
            for (int64_t j = 0; j < std::min(key_count, task.keys - first_key); ++j)
                kept[first_key + j] = at[j] * inverse[row];
        }
        if (task.pairs)
            for (int64_t pair = task.pair_first[index]; pair < task.pair_first[index + 1]; ++pair) {
                const int64_t j = task.pair_keys[pair] - first_key;
                if (0 <= j && j < key_count)
                    task.pairs[head * task.pair_count + pair] = at[j] * inverse[row];
            }
    }

    // The sum of |position of the query - key| times the row's exponentials.
    float summed_distance(int64_t row) const {
        Floats total = {};
        for (int64_t j = 0; j < key_count; j += LANES)
            total += distances(row, j) * load(scores + row * layout.score_stride + j);
        return sum(total);
    }

    // The sum of the squared differences of these distances from their mean.
    float summed_deviation(int64_t row, float mean) const {
        Floats total = {};
        for (int64_t j = 0; j < key_count; j += LANES) {
            const Floats apart = distances(row, j) - mean;
            total += apart * apart * load(scores + row * layout.score_stride + j);
        }
        return sum(total);
    }

    Floats distances(int64_t row, int64_t j) const {
        const int32_t position = int32_t(first_row + row) + task.starts[head / task.heads];
        const Ints apart = consecutive(first_key + j) - position;
        return __builtin_convertvector(apart < 0 ? -apart : apart, Floats);
    }

    void write_output(int64_t row) const {
        const int64_t index = head * task.queries + first_row + row;
        Element *output = static_cast<Element *>(task.output) + index * task.value_width;
        for (int64_t j = 0; j < task.value_width; ++j)
            output[j] = P::narrow(outputs[row * layout.value_width + j] * inverse[row]);
    }

    // Writes outputs and fields of a block of rows without keys.
    void write_empty_rows() {
        first_key = key_count = 0;
        std::fill_n(outputs, row_count * layout.value_width, 0.0f);
        for (int64_t row = 0; row < row_count; ++row) {
            softmax_row(row, -INFINITY);
            write_output(row);
        }
    }

    // ---- sums over rows ----

    void clear_sums() {
        std::fill_n(sums, layout.score_stride, 0.0f);
        std::fill_n(peaks, layout.score_stride, 0.0f);
        summed_from = task.keys, summed_to = 0;  // no keys yet
    }

    // Adds the weights of the rows begin <= row < end to `sums`, and updates `peaks`.
    void add_to_sums(int64_t begin, int64_t end) {
        if (!needs_sums || key_count == 0) return;
        summed_from = std::min(summed_from, first_key);
        summed_to = std::max(summed_to, std::min(first_key + key_count, task.keys));
        for (int64_t j = 0; j < key_count; j += 2 * LANES) {
            Floats left = {}, right = {}, left_peak = {}, right_peak = {};
            for (int64_t row = begin - first_row; row < end - first_row; ++row) {
                const float *at = scores + row * layout.score_stride + j;
                const Floats a = load(at) * inverse[row], b = load(at + LANES) * inverse[row];
                left += a;
                right += b;
                if (task.map_peak) {
                    left_peak = a > left_peak ? a : left_peak;
                    right_peak = b > right_peak ? b : right_peak;
                }
            }
            float *sum_at = sums + first_key + j, *peak_at = peaks + first_key + j;
            store(sum_at, load(sum_at) + left);
            store(sum_at + LANES, load(sum_at + LANES) + right);
            if (task.map_peak)
                for (int lane = 0; lane < LANES; ++lane) {
                    peak_at[lane] = std::max(peak_at[lane], left_peak[lane]);
                    peak_at[LANES + lane] = std::max(peak_at[LANES + lane], right_peak[lane]);
                }
        }
    }

    // Adds the sums of a finished bin to `received`, and writes the bin's row of the map.
    void finish_bin(int64_t bin) {
        if (!needs_sums) return;
        if (received)
            for (int64_t j = summed_from; j < summed_to; ++j) received[j] += sums[j];
        if (task.map) {
            const int64_t columns = task.map_columns, row = head * task.map_rows + bin;
            for (int64_t column = summed_from * columns / task.keys; column < columns; ++column) {
                const int64_t begin = std::max(summed_from, bin_start(column, task.keys, columns));
                const int64_t end = std::min(summed_to, bin_start(column + 1, task.keys, columns));
                if (begin >= end) break;
                float total = 0, largest = 0;
                for (int64_t j = begin; j < end; ++j) {
                    total += sums[j];
                    largest = std::max(largest, peaks[j]);
                }
                task.map[row * columns + column] = total;
                if (task.map_peak) task.map_peak[row * columns + column] = largest;
            }
        }
        clear_sums();
    }
};

// ---- all threads -------------------------------------------------------------------------------

// Packs keys and values, then computes all chunks. Returns false, before computing, if an input is
// not finite.
template <class Element, class TileSetup>
bool attend(const Task &task) {
    const Layout<Element> layout(task);
    const int64_t group = task.heads / task.key_heads;
    std::atomic<bool> inputs_finite{true};
    parallel(task.batch * task.key_heads, task.threads, [&](int64_t) {
        return [&](int64_t unit) {
            const int64_t sequence = unit / task.key_heads, head = unit % task.key_heads;
            const int64_t *q = task.query_strides, *k = task.key_strides, *v = task.value_strides;
            const Element *key = head_matrix<Element>(task.key, k, sequence, head);
            const Element *value = head_matrix<Element>(task.value, v, sequence, head);
            bool finite = all_finite(key, k[2], task.keys, task.width) &&
                          all_finite(value, v[2], task.keys, task.value_width);
            for (int64_t q_head = head * group; q_head < (head + 1) * group; ++q_head)
                finite = finite && all_finite(head_matrix<Element>(task.query, q, sequence, q_head),
                                              q[2], task.queries, task.width);
            if (!finite) inputs_finite = false;
            pack(key, 1, k[2], task.width, task.keys, layout.depth,
                 reinterpret_cast<Element *>(task.packed_keys + unit * layout.key_head()));
            pack(value, v[2], 1, task.keys, task.value_width, layout.keys,
                 reinterpret_cast<Element *>(task.packed_values + unit * layout.value_head()));
        };
    });
    if (!inputs_finite) return false;
    const int64_t units = task.batch * task.heads * task.chunks;
    parallel(units, task.threads, [&](int64_t thread) {
        // The last rows of a causal call take longest, so they are computed first.
        return [tiles = TileSetup(), worker = Worker<Element>(task, thread), units](
                   int64_t unit) mutable { worker.compute_chunk(units - 1 - unit); };
    });
    return true;
}

// The bytes of packed_keys, packed_values and scratch.
template <class Element>
void buffer_bytes(const Task &task, int64_t *bytes) {
    const Layout<Element> layout(task);
    bytes[0] = task.batch * task.key_heads * layout.key_head();
    bytes[1] = task.batch * task.key_heads * layout.value_head();
    bytes[2] = task.threads * layout.scratch();
}

}  // namespace

extern "C" {

// Whether the CPU has AMX for bfloat16 and the Linux kernel permits this process to use it.
int has_tiles() {
#ifdef AMX_BFLOAT16
    // For arch_prctl: ARCH_REQ_XCOMP_PERM and XTILEDATA.
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#else
    return 0;
#endif
}

// Writes the bytes of packed_keys, packed_values and scratch to bytes[3].
void attention_buffers(const Task *task, int bfloat16, int64_t *bytes) {
#ifdef AMX_BFLOAT16
    if (bfloat16) return buffer_bytes<BFloat>(*task, bytes);
#endif
    (void)bfloat16;
    buffer_bytes<float>(*task, bytes);
}

// Computes all requested fields. Returns 0, without results, if an input is not finite.
int attention(const Task *task, int bfloat16) {
#ifdef AMX_BFLOAT16
    if (bfloat16) return attend<BFloat, TileConfig>(*task);
#endif
    (void)bfloat16;
    return attend<float, NoTileConfig>(*task);
}
}
