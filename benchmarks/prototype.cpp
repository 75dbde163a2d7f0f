// The program that tiny pages are measured against: a pool of slots, and below it one file a block.
//
//     prototype FOLDER NUM_BLOCKS NUM_SLOTS NUM_READS NUM_FLOATS
//
// Puts NUM_BLOCKS blocks into a pool for NUM_SLOTS; a block that has to leave is written to its own
// file. Then reads NUM_READS random blocks of those that left, each from its file. Nothing is
// synced. Prints the seconds of the puts, the seconds of the reads, and a sum over what was read.

#include <chrono>
#include <cstdint>
#include <fstream>
#include <iostream>
#include <list>
#include <random>
#include <string>
#include <unordered_map>
#include <vector>

class BlockCache {
public:
    BlockCache(std::string folder, std::size_t num_slots, std::size_t num_floats)
        : folder_(std::move(folder)), num_floats_(num_floats), pool_(num_slots * num_floats) {
        for (std::size_t slot = num_slots; slot > 0; --slot) free_.push_back(slot - 1);
    }

    void put(std::uint64_t block, const std::vector<float>& values) {
        if (free_.empty()) evict();
        const std::size_t slot = free_.back();
        free_.pop_back();
        std::copy(values.begin(), values.end(), pool_.begin() + slot * num_floats_);
        order_.push_back(block);
        places_[block] = {slot, std::prev(order_.end())};
    }

    bool read_stored(std::uint64_t block, std::vector<float>& values) const {
        std::ifstream file(path(block), std::ios::binary);
        file.read(reinterpret_cast<char*>(values.data()), num_floats_ * sizeof(float));
        return static_cast<bool>(file);
    }

private:
    struct Place {
        std::size_t slot;
        std::list<std::uint64_t>::iterator position;
    };

    std::string path(std::uint64_t block) const {
        return folder_ + "/block_" + std::to_string(block) + ".bin";
    }

    void evict() {
        const std::uint64_t block = order_.front();
        const Place place = places_.at(block);
        std::ofstream file(path(block), std::ios::binary);
        file.write(reinterpret_cast<const char*>(&pool_[place.slot * num_floats_]),
                   num_floats_ * sizeof(float));
        order_.pop_front();
        places_.erase(block);
        free_.push_back(place.slot);
    }

    std::string folder_;
    std::size_t num_floats_;
    std::vector<float> pool_;
    std::vector<std::size_t> free_;
    std::list<std::uint64_t> order_;
    std::unordered_map<std::uint64_t, Place> places_;
};

static double seconds_since(std::chrono::steady_clock::time_point began) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
}

int main(int argc, char** argv) {
    if (argc != 6) {
        std::cerr << "usage: prototype FOLDER NUM_BLOCKS NUM_SLOTS NUM_READS NUM_FLOATS\n";
        return 2;
    }
    const std::uint64_t num_blocks = std::stoull(argv[2]);
    const std::uint64_t num_slots = std::stoull(argv[3]);
    const std::uint64_t num_reads = std::stoull(argv[4]);
    const std::size_t num_floats = std::stoull(argv[5]);
    std::mt19937_64 random(0);
    std::vector<std::vector<float>> blocks(num_blocks, std::vector<float>(num_floats));
    for (auto& block : blocks)
        for (auto& value : block) value = static_cast<float>(random() >> 40);
    std::vector<std::uint64_t> wanted(num_reads);
    for (auto& block : wanted) block = random() % (num_blocks - num_slots);

    BlockCache cache(argv[1], num_slots, num_floats);
    auto began = std::chrono::steady_clock::now();
    for (std::uint64_t block = 0; block < num_blocks; ++block) cache.put(block, blocks[block]);
    const double put_seconds = seconds_since(began);

    std::vector<float> values(num_floats);
    double sum = 0;
    began = std::chrono::steady_clock::now();
    for (const std::uint64_t block : wanted) {
        if (!cache.read_stored(block, values) || values != blocks[block]) {
            std::cerr << "block " << block << " did not come back\n";
            return 1;
        }
        sum += values[0];
    }
    const double read_seconds = seconds_since(began);
    std::cout << put_seconds << ' ' << read_seconds << ' ' << sum << '\n';
}
