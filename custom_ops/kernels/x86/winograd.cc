#include "kernels/x86/winograd.h"

#include "kernels/common/winograd.h"
#include "kernels/x86/winograd_schemes.h"

namespace lowbit {

std::span<const KernelRow> WinogradRows() {
  static const char *const kFour = "3x3 of stride 1: F(4x4) with 16-bit operands",
                           *kTwo = "3x3 of stride 1, images of a few pixels: F(2x2) with 16-bit operands",
                           *kBytes = "3x3 of stride 1, few bits: F(2x2) with 8-bit operands";
  static const KernelRow kRows[] = {
      WinogradRow<kWinogradFourAvx2>(
          {"winograd_f4_s16_6x16_avx2", "conv", "winograd", Isa::kAvx2, 8, 8, kFour}),
      WinogradRow<kWinogradTwoAvx2>(
          {"winograd_f2_s16_6x16_avx2", "conv", "winograd", Isa::kAvx2, 8, 8, kTwo}),
      WinogradRow<kWinogradFourAvxVnni>(
          {"winograd_f4_s16_6x16_avxvnni", "conv", "winograd", Isa::kAvxVnni, 8, 8, kFour}),
      WinogradRow<kWinogradBytesAvxVnni>(
          {"winograd_f2_u8s8_6x16_avxvnni", "conv", "winograd", Isa::kAvxVnni, 6, 8, kBytes}),
      WinogradRow<kWinogradFourAvx512>(
          {"winograd_f4_s16_8x32_avx512vnni", "conv", "winograd", Isa::kAvx512Vnni, 8, 8, kFour}),
      WinogradRow<kWinogradTwoAvx512>(
          {"winograd_f2_s16_8x32_avx512vnni", "conv", "winograd", Isa::kAvx512Vnni, 8, 8, kTwo}),
      WinogradRow<kWinogradBytesAvx512>(
          {"winograd_f2_u8s8_8x32_avx512vnni", "conv", "winograd", Isa::kAvx512Vnni, 6, 8, kBytes}),
  };
  return kRows;
}

}  // namespace lowbit
