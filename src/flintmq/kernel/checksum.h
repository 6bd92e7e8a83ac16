/* CRC-32C of a piece of memory, with the processor's own instruction where there is one.

   The instruction takes three cycles and can be started in each: so three parts of the data are summed at the same
   time, and put together with a table that says what a part's length of zeros does to a sum. */
#ifndef FLINTMQ_CHECKSUM_H
#define FLINTMQ_CHECKSUM_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define FLINTMQ_PART 1024

static uint32_t flintmq_table[256];
static uint32_t flintmq_skip[4][256];
static int flintmq_ready = 0;

static uint32_t flintmq_crc_plain(uint32_t crc, const unsigned char *p, size_t n) {
    while (n--)
        crc = flintmq_table[(crc ^ *p++) & 255] ^ (crc >> 8);
    return crc;
}

static void flintmq_prepare(void) {
    static const unsigned char zeros[FLINTMQ_PART];
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t crc = i;
        for (int bit = 0; bit < 8; bit++)
            crc = crc & 1 ? (crc >> 1) ^ 0x82f63b78u : crc >> 1;
        flintmq_table[i] = crc;
    }
    /* The sum is linear: what zeros do to each bit is enough to know what they do to every byte. */
    for (int k = 0; k < 4; k++) {
        flintmq_skip[k][0] = 0;
        for (int bit = 0; bit < 8; bit++)
            flintmq_skip[k][1 << bit] = flintmq_crc_plain(1u << (8 * k + bit), zeros, FLINTMQ_PART);
        for (int i = 1; i < 256; i++)
            flintmq_skip[k][i] = flintmq_skip[k][i & (i - 1)] ^ flintmq_skip[k][i & -i];
    }
    flintmq_ready = 1;
}

#if defined(__x86_64__) && defined(__GNUC__)
#define FLINTMQ_HAS_CRC __builtin_cpu_supports("sse4.2")
#define FLINTMQ_CRC_TARGET __attribute__((target("sse4.2")))
#define FLINTMQ_CRC8(crc, v) __builtin_ia32_crc32di((crc), (v))
#define FLINTMQ_CRC1(crc, v) __builtin_ia32_crc32qi((uint32_t)(crc), (v))
#elif defined(__aarch64__) && defined(__ARM_FEATURE_CRC32) && defined(__GNUC__)
#include <arm_acle.h>
#define FLINTMQ_HAS_CRC 1
#define FLINTMQ_CRC_TARGET
#define FLINTMQ_CRC8(crc, v) __crc32cd((uint32_t)(crc), (v))
#define FLINTMQ_CRC1(crc, v) __crc32cb((uint32_t)(crc), (v))
#endif

#ifdef FLINTMQ_HAS_CRC

static uint32_t flintmq_skip_part(uint32_t crc) {
    return flintmq_skip[0][crc & 255] ^ flintmq_skip[1][(crc >> 8) & 255] ^ flintmq_skip[2][(crc >> 16) & 255] ^
           flintmq_skip[3][crc >> 24];
}

FLINTMQ_CRC_TARGET
static uint32_t flintmq_crc_fast(uint32_t start, const unsigned char *p, size_t n) {
    uint64_t a = start, b, c, x, y, z;
    while (n >= 3 * FLINTMQ_PART) {
        b = c = 0;
        for (size_t i = 0; i < FLINTMQ_PART; i += 8) {
            memcpy(&x, p + i, 8);
            memcpy(&y, p + FLINTMQ_PART + i, 8);
            memcpy(&z, p + 2 * FLINTMQ_PART + i, 8);
            a = FLINTMQ_CRC8(a, x);
            b = FLINTMQ_CRC8(b, y);
            c = FLINTMQ_CRC8(c, z);
        }
        a = flintmq_skip_part((uint32_t)a) ^ b;
        a = flintmq_skip_part((uint32_t)a) ^ c;
        p += 3 * FLINTMQ_PART;
        n -= 3 * FLINTMQ_PART;
    }
    for (; n >= 8; p += 8, n -= 8) {
        memcpy(&x, p, 8);
        a = FLINTMQ_CRC8(a, x);
    }
    for (; n; p++, n--)
        a = FLINTMQ_CRC1(a, *p);
    return (uint32_t)a;
}

#endif

/* The checksum of what `crc` is the checksum of, followed by these bytes. */
static uint32_t flintmq_crc32c(uint32_t crc, const unsigned char *p, size_t n) {
    if (!flintmq_ready)
        flintmq_prepare();
#ifdef FLINTMQ_HAS_CRC
    if (FLINTMQ_HAS_CRC)
        return ~flintmq_crc_fast(~crc, p, n);
#endif
    return ~flintmq_crc_plain(~crc, p, n);
}

#endif
