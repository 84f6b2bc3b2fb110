//! map_row of plugins/tensorrt on the host.
//!
//!   row_map PADDED_LENGTH TOKENS last,last,... slot,slot,... [initial,initial,...]
//!
//!   row_map check SLOTS slot,slot,...
//!
//! Prints cu_seqlens, slots (padded input alone) and has_initial, one line each; `check`: what a debug build says of the slots.
#include "../../plugins/tensorrt/row_map.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <string>
#include <vector>

namespace {

std::vector<int32_t> numbers(const char* text) {
    std::vector<int32_t> out;
    std::stringstream in(text);
    for (std::string part; std::getline(in, part, ',');)
        out.push_back(std::atoi(part.c_str()));
    return out;
}

template <class Type>
void print(const char* name, const std::vector<Type>& values) {
    std::printf("%s", name);
    for (Type value : values)
        std::printf(" %d", static_cast<int>(value));
    std::printf("\n");
}

} // namespace

int main(int argc, char** argv) {
    if (argc == 4 && std::strcmp(argv[1], "check") == 0) {
        const auto slots = numbers(argv[3]);
        for (int row = 0; row < static_cast<int>(slots.size()); ++row)
            replayssm::plugin::check_slot(slots.data(), row, std::atoll(argv[2]));
        return 0;
    }
    if (argc < 5) return 2;
    const auto last = numbers(argv[3]), slots = numbers(argv[4]);
    const auto initial = argc > 5 ? numbers(argv[5]) : std::vector<int32_t>();
    replayssm::plugin::ScanRowsParams in;
    in.padded_length = std::atoi(argv[1]);
    in.tokens = std::atoi(argv[2]);
    in.rows = static_cast<int>(last.size());
    in.last_token_ids = last.data();
    in.slot_mapping = slots.data();
    in.has_initial = initial.empty() ? nullptr : initial.data();
    const size_t sequences = in.padded_length > 0 ? 2 * last.size() : last.size();
    std::vector<int32_t> cu_seqlens(sequences + 1, -9), out_slots(sequences, -9);
    std::vector<uint8_t> has_initial(sequences, 9);
    // In no particular order, as threads run.
    for (int row = in.rows; row >= 0; --row)
        map_row(in, {cu_seqlens.data(), out_slots.data(), has_initial.data()}, row);
    print("cu_seqlens", cu_seqlens);
    if (in.padded_length > 0) print("slots", out_slots);
    print("has_initial", has_initial);
    return 0;
}
