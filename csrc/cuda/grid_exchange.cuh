// How blocks of a grid that runs as a whole exchange two numbers for each row that they hold
// together, by way of words in device memory.
//
// One warp of each block merges what all have posted of a row, tells it to the other blocks, waits
// for what they tell, and leaves what follows from it where its own block finds it. So the others
// wait for no word in device memory, and meet at no barrier of the block. It does nothing else
// where there is room for another warp.
//
// A word has two numbers of a block and, as a tag, that of their row, so that who reads it knows
// whose they are without another access. Rows take turns in kGridExchanges words. A warp posts row
// i + n, n = 1 to 3, before it collects row i: so who posts row r has collected row r - n - 1. All
// blocks have posted that, whose warps have collected row r - 2 n - 2 by then: the row whose words
// are written anew, or a later one. For that to hold all blocks are waited for, those without
// columns too.
#pragma once

#include <cstdint>

#include "async.cuh"
#include "reduce.cuh"

namespace fastnorm::cuda {

// Two numbers and their tag.
struct GridWord {
  float first = 0, second = 0;
  unsigned tag = 0;
};

// In one access of 16 bytes.
__device__ __forceinline__ void store_word(uint4* place, const GridWord& word) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{.reg .b128 word; mov.b128 word, {%1, %2}; st.relaxed.gpu.global.b128 [%0], word;}" ::"l"(
          place),
      "l"(uint64_t{__float_as_uint(word.second)} << 32 | __float_as_uint(word.first)),
      "l"(uint64_t{word.tag})
      : "memory");
#endif
}

__device__ __forceinline__ GridWord load_word(const uint4* place) {
  uint64_t numbers = 0, tag = 0;
#if __CUDA_ARCH__ >= 900
  asm volatile("{.reg .b128 word; ld.relaxed.gpu.global.b128 word, [%2]; mov.b128 {%0, %1}, word;}"
               : "=l"(numbers), "=l"(tag)
               : "l"(place)
               : "memory");
#endif
  return {__uint_as_float(static_cast<unsigned>(numbers)),
          __uint_as_float(static_cast<unsigned>(numbers >> 32)), static_cast<unsigned>(tag)};
}

constexpr int kGridWarps = kMaxThreadsPerRow / kWarpSize;  // of a block, with columns

// A block among those that hold a row together, and where they tell each other of it.
struct GridPlace {
  uint4* words;  // [kGridExchanges][blocks]
  int blocks, rank;

  __device__ __forceinline__ uint4* words_of(int row) const {
    return words + row % kGridExchanges * blocks;
  }
};

// A number in shared memory, in all lanes of a warp, of which lane 0 alone reads it. Where that
// lane alone arrives for the warp at a barrier, behind which others write there anew, its own order
// is all that takes: shuffles do not order reads of other lanes before it.
__device__ __forceinline__ float read_by_first_lane(const volatile float& place) {
  float value = 0;
  if (threadIdx.x % kWarpSize == 0) value = place;
  return __shfl_sync(kAllLanes, value, 0);
}

class GridExchange {
 public:
  static constexpr int kWordsOfLane = (kMaxGridBlocks + kWarpSize - 1) / kWarpSize;

  struct Storage {
    float2 rows[kGridExchanges];                  // what follows from all blocks
    float warps[kGridExchanges][2 * kGridWarps];  // two numbers of each warp
    uint64_t posted[kGridExchanges];
    uint64_t collected[kGridExchanges];
  };

  // All threads of the block must come here, and then meet those of the whole grid. `posts`:
  // arrivals at a row.
  __device__ __forceinline__ GridExchange(Storage& storage, const GridPlace& place, int posts)
      : storage_(storage) {
    float* const all = &storage.warps[0][0];
    for (int i = threadIdx.x; i < kGridExchanges * 2 * kGridWarps; i += blockDim.x) all[i] = 0;
    if (threadIdx.x < kGridExchanges) {
      store_word(place.words_of(threadIdx.x) + place.rank, {});  // no tag of an earlier launch
      init_barrier(shared_address(&storage.posted[threadIdx.x]), posts);
      init_barrier(shared_address(&storage.collected[threadIdx.x]), kWarpSize);
      publish_barriers();
    }
  }

  // Where the warps put their numbers of a row, and what says that they are there.
  __device__ __forceinline__ float* warps(int row) const {
    return storage_.warps[row % kGridExchanges];
  }
  __device__ __forceinline__ void arrive_at(int row) const {
    arrive(shared_address(&storage_.posted[row % kGridExchanges]));
  }

  // What follows from all blocks' numbers of a row.
  __device__ __forceinline__ float2 wait_for(int row) const {
    wait_barrier<false>(shared_address(&storage_.collected[row % kGridExchanges]), phase(row));
    const float2& numbers = storage_.rows[row % kGridExchanges];
    return {read_by_first_lane(numbers.x), read_by_first_lane(numbers.y)};
  }

  // Tells the other blocks what all warps have posted of a row. of_warps(numbers): the block's two
  // numbers, from theirs. One warp comes here.
  template <class OfWarps>
  __device__ __forceinline__ void relay(const GridPlace& place, int row,
                                        const OfWarps& of_warps) const {
    const float2 mine = of_warps(warps(row));
    if (threadIdx.x % kWarpSize == 0) {
      store_word(place.words_of(row) + place.rank, {mine.x, mine.y, tag_of(row)});
    }
  }
  __device__ __forceinline__ void wait_for_warps(int row) const {
    wait_barrier<false>(shared_address(&storage_.posted[row % kGridExchanges]), phase(row));
  }
  __device__ __forceinline__ bool have_posted(int row) const {
    const bool ended =
        has_ended(shared_address(&storage_.posted[row % kGridExchanges]), phase(row));
    return __all_sync(kAllLanes, ended);
  }

  // Waits for what all blocks tell of a row, and leaves what follows from it for wait_for.
  // of_blocks(words): of each lane lane, lane + 32, ...; zeros for blocks that do not exist.
  // `meanwhile`: what is done while words are on their way.
  template <class OfBlocks, class Meanwhile>
  __device__ __forceinline__ void collect(const GridPlace& place, int row,
                                          const OfBlocks& of_blocks,
                                          const Meanwhile& meanwhile) const {
    const int lane = threadIdx.x % kWarpSize;
    const uint4* const first = place.words_of(row) + lane;
    GridWord found[kWordsOfLane];
    bool missing;
    do {
#pragma unroll
      for (int j = 0; j < kWordsOfLane; ++j) {
        if (found[j].tag != tag_of(row) && lane + j * kWarpSize < place.blocks) {
          found[j] = load_word(first + j * kWarpSize);
        }
      }
      meanwhile();
      missing = false;
#pragma unroll
      for (int j = 0; j < kWordsOfLane; ++j) {
        missing |= found[j].tag != tag_of(row) && lane + j * kWarpSize < place.blocks;
      }
    } while (__any_sync(kAllLanes, missing));
    const float2 numbers = of_blocks(found);
    if (lane == 0) storage_.rows[row % kGridExchanges] = numbers;
    __syncwarp();  // all lanes have read what of_blocks leaves for them
    // By every lane, for each has read what the block's warps had posted, which they post anew.
    arrive(shared_address(&storage_.collected[row % kGridExchanges]));
  }

  // What a warp of its own does for `count` rows, which the others post `ahead` rows ahead.
  template <class OfWarps, class OfBlocks>
  __device__ __forceinline__ void serve(const GridPlace& place, int ahead, int count,
                                        const OfWarps& of_warps, const OfBlocks& of_blocks) const {
    int told = 0;
#pragma unroll 1
    for (int row = 0; row < count; ++row) {
      if (told == row) {
        wait_for_warps(row);
        relay(place, told++, of_warps);
      }
      const int last = min(count - 1, row + ahead);  // that may be posted by now
      collect(place, row, of_blocks, [&] {
        constexpr int kLooks = 8;
#pragma unroll 1
        for (int look = 0; look < kLooks && told <= last; ++look) {
          if (have_posted(told)) relay(place, told++, of_warps);
        }
      });
    }
  }

  // The same by a warp that has columns too: tells what all warps have posted of row `told`, and
  // collects row `row`, those that there are.
  template <class OfWarps, class OfBlocks>
  __device__ __forceinline__ void serve_turn(const GridPlace& place, int told, int row, int count,
                                             const OfWarps& of_warps,
                                             const OfBlocks& of_blocks) const {
    if (told < count) {
      wait_for_warps(told);
      relay(place, told, of_warps);
    }
    if (row >= 0) collect(place, row, of_blocks, [] {});
  }

 private:
  Storage& storage_;

  static __device__ __forceinline__ int phase(int row) { return row / kGridExchanges % 2; }
  static __device__ __forceinline__ unsigned tag_of(int row) {
    return static_cast<unsigned>(row) + 1;
  }
};

}  // namespace fastnorm::cuda
