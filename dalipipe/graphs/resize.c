/* Antialiased bilinear resize of RGB uint8 windows that may begin and end at fractions of a pixel, straight into a
 * batch: mirrored, through a table of the finished values, in any layout. C99 without libraries; called by resize.py.
 *
 * A triangle of half-width max(scale, 1) source pixels around the centre of each output pixel, cut at the edges of the
 * window and normalised, as in Pillow. Horizontal, then vertical, uint8 between the two, int16 fixed-point weights with
 * as many fractional bits as the largest weight of a side leaves: the arithmetic of torch's uint8 kernel, whose bits it
 * gives for windows that begin at whole pixels. Rows come out of a ring that stays in the CPU's first cache.
 *
 * The three paths (plain C, SSE4.1, AVX2) give the same bits. Nothing outside a window's rows is read.
 */
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

#define VERSION 1       /* also in native.py; raised with every change of Task, Target or a function's arguments */
#define GROUP 4         /* taps that a vector instruction takes at once */
#define SLACK 32        /* bytes that vector stores may write behind a row of scratch */
#define MOST_BITS 22

enum { PLAIN, SSE4, AVX2 };

typedef struct {
    const uint8_t *pixels;          /* first byte of the window */
    int64_t height, width, stride;  /* pixels, pixels, bytes from row to row */
    double top, left;               /* where the output begins, in pixels of the window */
    double down, right;             /* source pixels per output pixel */
    uint8_t *out;                   /* first byte of the output image */
    int64_t mirror;
} Task;

typedef struct {
    int64_t height, width;                /* of every output image, pixels */
    int64_t row, column, channel;         /* bytes from one to the next */
    int64_t item_bytes;                   /* of an output value: 1, 2 or 4 */
    const void *table;                    /* [3][256] values by channel and level; NULL: the levels themselves */
    int64_t floats;                       /* not 0: the table is (level - mean) * inverse, in single or half precision */
    float mean[3], inverse[3];
} Target;

typedef struct {
    int64_t taps;      /* weights an output pixel, a multiple of GROUP; those after `count` are 0 */
    int32_t bits;      /* fractional ones */
    int32_t *first, *count;
    int16_t *weights;
} Filter;

static int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

static int64_t most_taps(double scale)
{
    double support = scale > 1.0 ? scale : 1.0;
    return round_up(2 * ((int64_t)support + 1) + 1, GROUP);
}

/* Bytes of scratch of a filter: what is kept, and the weights before they are rounded. */
static int64_t filter_bytes(int64_t num, int64_t taps)
{
    return round_up(num * (2 * (int64_t)sizeof(int32_t) + taps * (int64_t)sizeof(int16_t)), 64)
        + taps * num * (int64_t)sizeof(double);
}

static void make_filter(Filter *f, uint8_t *scratch, int64_t side, int64_t num, double begin, double scale, int mirror)
{
    double support = scale > 1.0 ? scale : 1.0, inverse = scale > 1.0 ? 1.0 / scale : 1.0, largest = 0.0;
    int64_t taps = most_taps(scale), used = 1;
    double *exact = (double *)scratch; /* the doubles lie in front, for their alignment */
    f->first = (int32_t *)(scratch + taps * num * (int64_t)sizeof(double));
    f->count = f->first + num;
    f->weights = (int16_t *)(f->count + num);
    for (int64_t i = 0; i < num; ++i) {
        double centre = begin + scale * ((double)i + 0.5), total = 0.0;
        double *weight = exact + i * taps;
        int64_t low = (int64_t)(centre - support + 0.5), high = (int64_t)(centre + support + 0.5);
        low = low < 0 ? 0 : low > side - 1 ? side - 1 : low;
        high = high > side ? side : high < low + 1 ? low + 1 : high;
        if (high > low + taps)
            high = low + taps;
        for (int64_t k = 0; k < high - low; ++k) {
            double x = ((double)(k + low) - centre + 0.5) * inverse;
            x = x < 0.0 ? -x : x;
            weight[k] = x < 1.0 ? 1.0 - x : 0.0;
            total += weight[k];
        }
        for (int64_t k = 0; k < high - low; ++k) {
            weight[k] = total > 0.0 ? weight[k] / total : 0.0;
            largest = weight[k] > largest ? weight[k] : largest;
        }
        int64_t place = mirror ? num - 1 - i : i;
        f->first[place] = (int32_t)low;
        f->count[place] = (int32_t)(high - low);
        used = high - low > used ? high - low : used;
    }
    f->bits = 0;
    while (f->bits < MOST_BITS && (int)(0.5 + largest * (1 << (f->bits + 1))) < 1 << 15)
        ++f->bits;
    f->taps = round_up(used, GROUP);
    for (int64_t place = 0; place < num; ++place) {
        const double *weight = exact + (mirror ? num - 1 - place : place) * taps;
        for (int64_t k = 0; k < f->taps; ++k)
            f->weights[place * f->taps + k] =
                k < f->count[place] ? (int16_t)(0.5 + weight[k] * (1 << f->bits)) : (int16_t)0;
    }
}

static uint8_t level(int32_t sum, int bits)
{
    sum >>= bits; /* weights are never negative, so that only the upper end is to be cut */
    return sum > 255 ? 255 : (uint8_t)sum;
}

static void pixel_plain(const uint8_t *source, uint8_t *out, const Filter *f, int64_t x)
{
    const uint8_t *pixel = source + 3 * (int64_t)f->first[x];
    const int16_t *weight = f->weights + x * f->taps;
    int32_t red, green, blue;
    red = green = blue = f->bits ? 1 << (f->bits - 1) : 0;
    for (int32_t k = 0; k < f->count[x]; ++k, pixel += 3) {
        red += weight[k] * pixel[0];
        green += weight[k] * pixel[1];
        blue += weight[k] * pixel[2];
    }
    out[3 * x] = level(red, f->bits);
    out[3 * x + 1] = level(green, f->bits);
    out[3 * x + 2] = level(blue, f->bits);
}

/* Two source rows at once (the second may be the first again): `num` output pixels of each. */
static void across_plain(const uint8_t *const source[2], uint8_t *const out[2], const Filter *f, int64_t num, int64_t width)
{
    (void)width;
    for (int row = 0; row < 2; ++row)
        for (int64_t x = 0; x < num; ++x)
            pixel_plain(source[row], out[row], f, x);
}

/* One output row of `num` bytes out of `taps` rows, an even number. */
static void down_plain(const uint8_t *const *rows, const int16_t *weights, int64_t taps, int bits, uint8_t *out, int64_t num)
{
    for (int64_t x = 0; x < num; ++x) {
        int32_t sum = bits ? 1 << (bits - 1) : 0;
        for (int64_t k = 0; k < taps; ++k)
            sum += weights[k] * rows[k][x];
        out[x] = level(sum, bits);
    }
}

#if defined(__x86_64__)
/* Four neighbouring pixels, 12 of 16 bytes: red, green and blue of two of them as pairs of 16 bits. */
#define FIRST_PAIR 0, -1, 3, -1, 1, -1, 4, -1, 2, -1, 5, -1, -1, -1, -1, -1
#define OTHER_PAIR 6, -1, 9, -1, 7, -1, 10, -1, 8, -1, 11, -1, -1, -1, -1, -1
#define THIRDS 0, -1, -1, -1, 3, -1, -1, -1, 6, -1, -1, -1, 9, -1, -1, -1
#define CLOSE_UP 0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1
#define TARGET(name) __attribute__((target(name)))

static int32_t pair(const int16_t *weights)
{
    int32_t both;
    memcpy(&both, weights, sizeof both);
    return both;
}

/* Whether the vectors that output pixel x loads lie inside a row of `width` pixels. */
static int inside(const Filter *f, int64_t x, int64_t width)
{
    return 3 * (f->first[x] + f->taps - GROUP) + 16 <= 3 * width;
}

TARGET("sse4.1")
static void across_sse4(const uint8_t *const source[2], uint8_t *const out[2], const Filter *f, int64_t num, int64_t width)
{
    const __m128i low = _mm_setr_epi8(FIRST_PAIR), high = _mm_setr_epi8(OTHER_PAIR);
    const __m128i half = _mm_set1_epi32(f->bits ? 1 << (f->bits - 1) : 0), shift = _mm_cvtsi32_si128(f->bits);
    for (int row = 0; row < 2; ++row)
        for (int64_t x = 0; x < num; ++x) {
            if (!inside(f, x, width)) {
                pixel_plain(source[row], out[row], f, x);
                continue;
            }
            const uint8_t *pixel = source[row] + 3 * (int64_t)f->first[x];
            const int16_t *weight = f->weights + x * f->taps;
            __m128i sum = half;
            for (int64_t k = 0; k < f->taps; k += GROUP) {
                __m128i four = _mm_loadu_si128((const __m128i *)(pixel + 3 * k));
                __m128i a = _mm_madd_epi16(_mm_shuffle_epi8(four, low), _mm_set1_epi32(pair(weight + k)));
                __m128i b = _mm_madd_epi16(_mm_shuffle_epi8(four, high), _mm_set1_epi32(pair(weight + k + 2)));
                sum = _mm_add_epi32(sum, _mm_add_epi32(a, b));
            }
            sum = _mm_sra_epi32(sum, shift);
            sum = _mm_packs_epi32(sum, sum);
            int32_t bytes = _mm_cvtsi128_si32(_mm_packus_epi16(sum, sum));
            memcpy(out[row] + 3 * x, &bytes, sizeof bytes); /* the fourth byte falls into the next pixel or the slack */
        }
}

TARGET("sse4.1")
static void down_sse4(const uint8_t *const *rows, const int16_t *weights, int64_t taps, int bits, uint8_t *out, int64_t num)
{
    const __m128i zero = _mm_setzero_si128(), half = _mm_set1_epi32(bits ? 1 << (bits - 1) : 0);
    const __m128i shift = _mm_cvtsi32_si128(bits);
    for (int64_t x = 0; x < num; x += 16) {
        __m128i sum[4] = {half, half, half, half};
        for (int64_t k = 0; k < taps; k += 2) {
            const __m128i both = _mm_set1_epi32(pair(weights + k));
            __m128i upper = _mm_loadu_si128((const __m128i *)(rows[k] + x));
            __m128i lower = _mm_loadu_si128((const __m128i *)(rows[k + 1] + x));
            __m128i a = _mm_unpacklo_epi8(upper, lower), b = _mm_unpackhi_epi8(upper, lower);
            sum[0] = _mm_add_epi32(sum[0], _mm_madd_epi16(_mm_unpacklo_epi8(a, zero), both));
            sum[1] = _mm_add_epi32(sum[1], _mm_madd_epi16(_mm_unpackhi_epi8(a, zero), both));
            sum[2] = _mm_add_epi32(sum[2], _mm_madd_epi16(_mm_unpacklo_epi8(b, zero), both));
            sum[3] = _mm_add_epi32(sum[3], _mm_madd_epi16(_mm_unpackhi_epi8(b, zero), both));
        }
        __m128i a = _mm_packs_epi32(_mm_sra_epi32(sum[0], shift), _mm_sra_epi32(sum[1], shift));
        __m128i b = _mm_packs_epi32(_mm_sra_epi32(sum[2], shift), _mm_sra_epi32(sum[3], shift));
        _mm_storeu_si128((__m128i *)(out + x), _mm_packus_epi16(a, b));
    }
}

TARGET("avx2")
static inline __attribute__((always_inline)) void across_groups(
    const uint8_t *const source[2], uint8_t *const out[2], const Filter *f, int64_t num, int64_t width, int64_t taps)
{
    const __m256i low = _mm256_setr_epi8(FIRST_PAIR, FIRST_PAIR), high = _mm256_setr_epi8(OTHER_PAIR, OTHER_PAIR);
    const __m256i close_up = _mm256_setr_epi8(CLOSE_UP, CLOSE_UP);
    const __m256i half = _mm256_set1_epi32(f->bits ? 1 << (f->bits - 1) : 0);
    const __m128i shift = _mm_cvtsi32_si128(f->bits);
    const int32_t *first = f->first;
    const int16_t *weights = f->weights;
    const uint8_t *upper = source[0], *lower = source[1];
    uint8_t *above = out[0], *below = out[1];
    const int64_t last = width - 16 / 3 - 1 - (taps - GROUP); /* the last pixel from which a load ends inside the row */
    for (int64_t x = 0; x < num;) {
        /* `first` rises, or falls in a mirrored image: its largest of four is at an end. */
        if (x + 4 > num || first[x] > last || first[x + 3] > last) {
            pixel_plain(upper, above, f, x);
            pixel_plain(lower, below, f, x);
            ++x;
            continue;
        }
        __m256i sum[4];
        for (int i = 0; i < 4; ++i) {
            const int64_t at = 3 * (int64_t)first[x + i];
            const int16_t *weight = weights + (x + i) * taps;
            sum[i] = half;
            for (int64_t k = 0; k < taps; k += GROUP) {
                __m256i four = _mm256_inserti128_si256(
                    _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)(upper + at + 3 * k))),
                    _mm_loadu_si128((const __m128i *)(lower + at + 3 * k)), 1);
                __m256i a = _mm256_madd_epi16(_mm256_shuffle_epi8(four, low), _mm256_set1_epi32(pair(weight + k)));
                __m256i b = _mm256_madd_epi16(_mm256_shuffle_epi8(four, high), _mm256_set1_epi32(pair(weight + k + 2)));
                sum[i] = _mm256_add_epi32(sum[i], _mm256_add_epi32(a, b));
            }
            sum[i] = _mm256_sra_epi32(sum[i], shift);
        }
        __m256i bytes = _mm256_packus_epi16(_mm256_packs_epi32(sum[0], sum[1]), _mm256_packs_epi32(sum[2], sum[3]));
        bytes = _mm256_shuffle_epi8(bytes, close_up);
        _mm_storeu_si128((__m128i *)(above + 3 * x), _mm256_castsi256_si128(bytes));
        _mm_storeu_si128((__m128i *)(below + 3 * x), _mm256_extracti128_si256(bytes, 1));
        x += 4;
    }
}

TARGET("avx2")
static void across_avx2(const uint8_t *const source[2], uint8_t *const out[2], const Filter *f, int64_t num, int64_t width)
{
    if (f->taps == GROUP)
        across_groups(source, out, f, num, width, GROUP);
    else if (f->taps == 2 * GROUP)
        across_groups(source, out, f, num, width, 2 * GROUP);
    else
        across_groups(source, out, f, num, width, f->taps);
}

TARGET("avx2")
static void down_avx2(const uint8_t *const *rows, const int16_t *weights, int64_t taps, int bits, uint8_t *out, int64_t num)
{
    const __m256i zero = _mm256_setzero_si256(), half = _mm256_set1_epi32(bits ? 1 << (bits - 1) : 0);
    const __m128i shift = _mm_cvtsi32_si128(bits);
    for (int64_t x = 0; x < num; x += 32) {
        __m256i sum[4] = {half, half, half, half};
        for (int64_t k = 0; k < taps; k += 2) {
            const __m256i both = _mm256_set1_epi32(pair(weights + k));
            __m256i upper = _mm256_loadu_si256((const __m256i *)(rows[k] + x));
            __m256i lower = _mm256_loadu_si256((const __m256i *)(rows[k + 1] + x));
            __m256i a = _mm256_unpacklo_epi8(upper, lower), b = _mm256_unpackhi_epi8(upper, lower);
            sum[0] = _mm256_add_epi32(sum[0], _mm256_madd_epi16(_mm256_unpacklo_epi8(a, zero), both));
            sum[1] = _mm256_add_epi32(sum[1], _mm256_madd_epi16(_mm256_unpackhi_epi8(a, zero), both));
            sum[2] = _mm256_add_epi32(sum[2], _mm256_madd_epi16(_mm256_unpacklo_epi8(b, zero), both));
            sum[3] = _mm256_add_epi32(sum[3], _mm256_madd_epi16(_mm256_unpackhi_epi8(b, zero), both));
        }
        __m256i a = _mm256_packs_epi32(_mm256_sra_epi32(sum[0], shift), _mm256_sra_epi32(sum[1], shift));
        __m256i b = _mm256_packs_epi32(_mm256_sra_epi32(sum[2], shift), _mm256_sra_epi32(sum[3], shift));
        _mm256_storeu_si256((__m256i *)(out + x), _mm256_packus_epi16(a, b));
    }
}
#endif

/* Writes the levels of a row from pixel `from` on, one channel after the other. */
#define FINISH(type)                                                                                     \
    for (int channel = 0; channel < 3; ++channel) {                                                      \
        const type *values = (const type *)target->table + 256 * channel;                                \
        uint8_t *at = out + channel * target->channel;                                                   \
        for (int64_t x = from; x < target->width; ++x)                                                   \
            *(type *)(at + x * target->column) = values[levels[3 * x + channel]];                        \
    }

static void finish_plain(const uint8_t *levels, uint8_t *out, const Target *target, int64_t from)
{
    if (!target->table)
        memcpy(out, levels, (size_t)(3 * target->width));
    else if (target->item_bytes == 4)
        FINISH(uint32_t)
    else if (target->item_bytes == 2)
        FINISH(uint16_t)
    else
        FINISH(uint8_t)
}

#if defined(__x86_64__)
/* Floats whose channels lie apart, eight pixels at once; the same operations as made the table. */
TARGET("avx2,f16c")
static void finish_avx2(const uint8_t *levels, uint8_t *out, const Target *target, int64_t from)
{
    const int apart = target->floats && target->column == target->item_bytes;
    for (; apart && from + 8 <= target->width; from += 8) {
        const __m256i eight = _mm256_inserti128_si256(
            _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)(levels + 3 * from))),
            _mm_loadu_si128((const __m128i *)(levels + 3 * from + 12)), 1);
        for (int channel = 0; channel < 3; ++channel) {
            const __m256i every_third = _mm256_add_epi8(
                _mm256_setr_epi8(THIRDS, THIRDS), _mm256_set1_epi32(channel));
            __m256 value = _mm256_cvtepi32_ps(_mm256_shuffle_epi8(eight, every_third));
            value = _mm256_sub_ps(value, _mm256_set1_ps(target->mean[channel]));
            value = _mm256_mul_ps(value, _mm256_set1_ps(target->inverse[channel]));
            uint8_t *at = out + channel * target->channel + from * target->column;
            if (target->item_bytes == 4)
                _mm256_storeu_ps((float *)at, value);
            else
                _mm_storeu_si128((__m128i *)at, _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
        }
    }
    finish_plain(levels, out, target, from);
}
#endif

typedef void (*Across)(const uint8_t *const *, uint8_t *const *, const Filter *, int64_t, int64_t);
typedef void (*Down)(const uint8_t *const *, const int16_t *, int64_t, int, uint8_t *, int64_t);

typedef void (*Finish)(const uint8_t *, uint8_t *, const Target *, int64_t);

typedef struct { int64_t across, down, row, ring, pointers, total; } Plan;

static Plan plan(const Task *task, const Target *target)
{
    Plan p;
    int64_t taps = most_taps(task->down);
    p.across = round_up(filter_bytes(target->width, most_taps(task->right)), 64);
    p.down = round_up(filter_bytes(target->height, taps), 64);
    p.row = round_up(3 * target->width, 32) + SLACK;
    p.ring = taps + 2;
    p.pointers = round_up(taps * (int64_t)sizeof(uint8_t *), 64);
    p.total = p.across + p.down + p.pointers + (p.ring + 2) * p.row;
    return p;
}

static void resize(const Task *task, const Target *target, uint8_t *scratch, int path)
{
    const Plan p = plan(task, target);
    Across across = across_plain;
    Down down = down_plain;
    Finish finish = finish_plain;
    Filter columns, lines;
    int64_t done = 0; /* source rows that were resized across */
#if defined(__x86_64__)
    if (path == AVX2)
        across = across_avx2, down = down_avx2, finish = finish_avx2;
    else if (path == SSE4)
        across = across_sse4, down = down_sse4;
#else
    (void)path;
#endif
    make_filter(&columns, scratch, task->width, target->width, task->left, task->right, task->mirror != 0);
    make_filter(&lines, scratch += p.across, task->height, target->height, task->top, task->down, 0);
    const uint8_t **rows = (const uint8_t **)(scratch += p.down);
    uint8_t *ring = scratch += p.pointers, *spare = ring + p.ring * p.row, *levels = spare + p.row;
    for (int64_t y = 0; y < target->height; ++y) {
        int64_t first = lines.first[y], stop = first + lines.count[y];
        for (done = done < first ? first : done; done < stop; done += 2) {
            /* The second row may come before it is needed, or not exist. */
            int exists = done + 1 < task->height;
            const uint8_t *source[2] = {task->pixels + done * task->stride, task->pixels + (done + exists) * task->stride};
            uint8_t *out[2] = {ring + done % p.ring * p.row, exists ? ring + (done + 1) % p.ring * p.row : spare};
            across(source, out, &columns, target->width, task->width);
        }
        int64_t taps = round_up(lines.count[y], 2); /* the weight of one too many is 0 */
        for (int64_t k = 0; k < taps; ++k)
            rows[k] = ring + (k < lines.count[y] ? first + k : first) % p.ring * p.row;
        down(rows, lines.weights + y * lines.taps, taps, lines.bits, levels, 3 * target->width);
        finish(levels, task->out + y * target->row, target, 0);
    }
}

int64_t dalipipe_resize_version(void) { return VERSION; }

#if defined(__x86_64__)
/* Whether the CPU converts to half precision, which the AVX2 path does too: a hypervisor may hide that alone. Asked of
 * the CPU itself, as older compilers do not know the name; that the system saves the registers is part of "avx2". */
static int has_f16c(void)
{
    unsigned a, b, c = 0, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c >> 29 & 1);
}
#endif

/* The fastest path that this CPU has: 0 plain C, 1 SSE4.1, 2 AVX2. */
int64_t dalipipe_resize_path(void)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && has_f16c() ? AVX2 : __builtin_cpu_supports("sse4.1") ? SSE4 : PLAIN;
#else
    return PLAIN;
#endif
}

/* Bytes of scratch, aligned to 64, that the largest of `num` tasks needs. */
int64_t dalipipe_resize_scratch(const Task *tasks, int64_t num, const Target *target)
{
    int64_t most = 0;
    for (int64_t i = 0; i < num; ++i) {
        int64_t bytes = plan(tasks + i, target).total;
        most = bytes > most ? bytes : most;
    }
    return most;
}

/* Takes tasks from `next`, which threads share, until there are none or `stop` is not 0. The caller has checked them. */
void dalipipe_resize(
    const Task *tasks, int64_t num, const Target *target, int64_t *next, const int64_t *stop, uint8_t *scratch, int64_t path)
{
    int64_t i;
    while (!__atomic_load_n(stop, __ATOMIC_RELAXED) && (i = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED)) < num)
        resize(tasks + i, target, scratch, (int)path);
}
