// The contents of a page's file: copied to the KV memory and summed for its checksum, in one pass.
#pragma once

#include <cstdint>

namespace tw {

// Where one part of a page goes: `pieces` stretches of `bytes` each, `apart` bytes from one to the next.
struct PagePlace {
  int64_t address, pieces, apart, bytes;
};

// Rows of 512 words; contents of `bytes` bytes have as many as are whole.
constexpr int64_t SUMMED = 4096;

// Copies the contents of a page to its places, which take them one after another. sums: of the words of whole rows by
// column [512], and then by row.
void unpack_page(const char* contents, int64_t bytes, int64_t places, const PagePlace* place, uint64_t* sums);

}  // namespace tw
