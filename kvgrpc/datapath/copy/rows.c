/* Loops over many rows of bytes in one call, for what Python would have to call row by row, and over strips.
 *
 * Built when the package is installed, and optional: kvgrpc.datapath.copy.rows loads it with ctypes, which lets go of
 * the interpreter lock while a function runs. Every address was checked by the caller.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#define STREAM_BYTES 1024 /* shorter rows stay in the cache */
#define STEP_BYTES 1024
#define LINE_BYTES 64

typedef struct {
    int64_t to;
    int64_t from;
    int64_t nbytes;
} kvgrpc_copy;

typedef struct {
    int64_t at;
    int64_t from; /* 0: the bytes lie at `at` already */
    int64_t nbytes;
    int64_t checksum; /* where the uint32 stands that goes on with these bytes */
} kvgrpc_checksum;

/* Where a copy of a strip begins. */
typedef struct {
    int64_t to;
    int64_t from;
} kvgrpc_place;

/* What is copied at each place: run_bytes for every index of shape, the last dimension fastest. */
typedef struct {
    int64_t run_bytes;
    int64_t shape[4];
    int64_t to_steps[4];
    int64_t from_steps[4];
} kvgrpc_strip;

typedef uint32_t (*kvgrpc_extend)(uint32_t, const void *, size_t);

#if defined(__SSE2__)
/* As `stream`, a line a store: nothing has to be put together from four of them. `to` is a multiple of 64. */
__attribute__((target("avx512f"))) static void stream_lines(char *to, const char *from, size_t nbytes) {
    for (; nbytes; nbytes -= LINE_BYTES, to += LINE_BYTES, from += LINE_BYTES)
        _mm512_stream_si512((void *)to, _mm512_loadu_si512(from));
}
#endif

/* Copies whole cache lines past the cache: a block of KV is not read soon, and memmove would load each line that it is
 * about to overwrite. `to` is a multiple of 16, `nbytes` of 64. */
static void stream(char *to, const char *from, size_t nbytes) {
#if defined(__SSE2__)
    if ((uintptr_t)to % LINE_BYTES == 0 && __builtin_cpu_supports("avx512f")) {
        stream_lines(to, from, nbytes);
        return;
    }
    for (; nbytes; nbytes -= LINE_BYTES, to += LINE_BYTES, from += LINE_BYTES) {
        __m128i a = _mm_loadu_si128((const __m128i *)from);
        __m128i b = _mm_loadu_si128((const __m128i *)from + 1);
        __m128i c = _mm_loadu_si128((const __m128i *)from + 2);
        __m128i d = _mm_loadu_si128((const __m128i *)from + 3);
        _mm_stream_si128((__m128i *)to, a);
        _mm_stream_si128((__m128i *)to + 1, b);
        _mm_stream_si128((__m128i *)to + 2, c);
        _mm_stream_si128((__m128i *)to + 3, d);
    }
#else
    memcpy(to, from, nbytes);
#endif
}

/* Streaming stores are not ordered: before anything is told of the bytes, they are there. */
static void all_there(void) {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

/* The baseline of benchmarks: memcpy for one row after the other. */
void kvgrpc_memcpy_rows(const kvgrpc_copy *rows, size_t count) {
    for (size_t i = 0; i < count; i++)
        memcpy((void *)rows[i].to, (const void *)rows[i].from, (size_t)rows[i].nbytes);
}

/* Copies rows that do not overlap. */
void kvgrpc_copy_rows(const kvgrpc_copy *rows, size_t count) {
    for (size_t i = 0; i < count; i++) {
        char *to = (char *)rows[i].to;
        const char *from = (const char *)rows[i].from;
        size_t nbytes = (size_t)rows[i].nbytes;
        if ((uintptr_t)to % 16 || nbytes % LINE_BYTES || nbytes < STREAM_BYTES)
            memmove(to, from, nbytes);
        else
            stream(to, from, nbytes);
    }
    all_there();
}

/* Does COPY for `to` and `from` of each run of all places. */
#define EACH_RUN(COPY)                                                                                                 \
    for (size_t i = 0; i < count; i++)                                                                                 \
        for (int64_t a = 0; a < strip->shape[0]; a++)                                                                  \
            for (int64_t b = 0; b < strip->shape[1]; b++)                                                              \
                for (int64_t c = 0; c < strip->shape[2]; c++) {                                                        \
                    const int64_t *ts = strip->to_steps, *fs = strip->from_steps;                                      \
                    char *to = (char *)(places[i].to + a * ts[0] + b * ts[1] + c * ts[2]);                             \
                    const char *from = (const char *)(places[i].from + a * fs[0] + b * fs[1] + c * fs[2]);             \
                    for (int64_t d = 0; d < strip->shape[3]; d++, to += ts[3], from += fs[3])                          \
                        COPY;                                                                                          \
                }

#if defined(__SSE2__)
__attribute__((target("avx512f"))) static void strips_of_lines(const kvgrpc_place *places, size_t count,
                                                               const kvgrpc_strip *strip) {
    EACH_RUN(stream_lines(to, from, (size_t)strip->run_bytes))
}
#endif

/* Bits that are set in the address or the length of any run that is written. */
static uint64_t bits_of(const kvgrpc_place *places, size_t count, const kvgrpc_strip *strip) {
    int64_t bits = strip->run_bytes;
    for (size_t i = 0; i < count; i++)
        bits |= places[i].to;
    for (int d = 0; d < 4; d++)
        bits |= strip->shape[d] > 1 ? strip->to_steps[d] : 0;
    return (uint64_t)bits;
}

/* Copies strips, of which no two runs overlap: past the cache where runs are whole lines; of other short runs those of
 * usual lengths by copies whose length the compiler knows. */
void kvgrpc_copy_strips(const kvgrpc_place *places, size_t count, const kvgrpc_strip *strip) {
    size_t nbytes = (size_t)strip->run_bytes;
#if defined(__SSE2__)
    uint64_t bits = bits_of(places, count, strip);
    if (bits % LINE_BYTES == 0 && __builtin_cpu_supports("avx512f")) {
        strips_of_lines(places, count, strip);
        all_there();
        return;
    }
    if (bits % 16 == 0 && nbytes % LINE_BYTES == 0) {
        EACH_RUN(stream(to, from, nbytes))
        all_there();
        return;
    }
#endif
    switch (nbytes) {
    case 16:
        EACH_RUN(memcpy(to, from, 16))
        break;
    case 32:
        EACH_RUN(memcpy(to, from, 32))
        break;
    case 64:
        EACH_RUN(memcpy(to, from, 64))
        break;
    case 128:
        EACH_RUN(memcpy(to, from, 128))
        break;
    case 256:
        EACH_RUN(memcpy(to, from, 256))
        break;
    default:
        EACH_RUN(memcpy(to, from, nbytes))
    }
}

/* Where the rows go on that are fetched ahead. */
typedef struct {
    const kvgrpc_checksum *row;
    const kvgrpc_checksum *end;
    int64_t offset;
} ahead;

/* Fetches the next kilobyte, beyond the end of a row too: rows end too often for what the processor fetches by itself. */
static void fetch(ahead *next) {
    if (next->row == next->end)
        return;
    const kvgrpc_checksum *row = next->row;
    const char *from = (const char *)(row->from ? row->from : row->at) + next->offset;
    int64_t left = row->nbytes - next->offset;
    if (left > STEP_BYTES) {
        left = STEP_BYTES;
        next->offset += STEP_BYTES;
    } else {
        next->row++;
        next->offset = 0;
    }
    for (int64_t at = 0; at < left; at += LINE_BYTES)
        __builtin_prefetch(from + at);
}

/* Extends the checksum of each row by its bytes, and copies them on the way where they lie elsewhere: each byte is read
 * once, so that what the checksum is of is what is written, though the source may write there meanwhile.
 *
 * A kilobyte a step: CRC libraries go over three streams side by side, which in more than that lie too far from each
 * other. What is copied goes by way of a kilobyte on the stack and past the cache. Read again where it goes, it would
 * have to be fetched there first. */
void kvgrpc_checksum_rows(const kvgrpc_checksum *rows, size_t count, kvgrpc_extend extend) {
    char step[STEP_BYTES] __attribute__((aligned(LINE_BYTES)));
    ahead next = {rows, rows + count, 0};
    fetch(&next);
    fetch(&next);
    for (size_t i = 0; i < count; i++) {
        uint32_t *to = (uint32_t *)rows[i].checksum;
        uint32_t checksum = *to;
        for (int64_t done = 0; done < rows[i].nbytes;) {
            fetch(&next);
            size_t nbytes = rows[i].nbytes - done < STEP_BYTES ? (size_t)(rows[i].nbytes - done) : STEP_BYTES;
            char *at = (char *)rows[i].at + done;
            if (rows[i].from) {
                memcpy(step, (const char *)rows[i].from + done, nbytes);
                if ((uintptr_t)at % 16 || nbytes < STEP_BYTES)
                    memcpy(at, step, nbytes);
                else
                    stream(at, step, nbytes);
                checksum = extend(checksum, step, nbytes);
            } else {
                checksum = extend(checksum, at, nbytes);
            }
            done += (int64_t)nbytes;
        }
        *to = checksum; /* once a row: other threads' checksums lie in the same line of the cache */
    }
    all_there();
}
