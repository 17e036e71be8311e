// The contents of a page's file: copied to the KV memory and hashed for its MAC, in one pass.
#pragma once

#include <cstdint>

namespace tw {

// Where one part of a page goes: `pieces` stretches of `bytes` each, `apart` bytes from one to the next.
struct PagePlace {
  int64_t address, pieces, apart, bytes;
};

// Whole rows of HASHED bytes are hashed, each to HASHES words of 64 bits.
constexpr int64_t HASHED = 4096, HASHES = 2;

// Copies the contents of a page to its places, which take them one after another; without places it only hashes them.
// key: [HASHES][HASHED / 4], random. sums: [rows][HASHES]; for two different contents they are equal with one key in
// 2^64.
void unpack_page(const char* contents, int64_t bytes, int64_t places, const PagePlace* place, const uint32_t* key,
                 uint64_t* sums);

}  // namespace tw
