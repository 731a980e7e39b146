#include "core/schema.h"

#include <algorithm>

#include "core/selection.h"
#include "core/status.h"

namespace lowbit {
namespace {

using Ints = std::vector<int64_t>;
using Floats = std::vector<float>;

AttributeSchema Required(const char* name, AttributeKind kind, const char* doc) {
  return {name, kind, true, int64_t{0}, kMinimal ? "" : doc};
}
AttributeSchema Optional(const char* name, AttributeValue value, const char* doc) {
  constexpr AttributeKind kKinds[] = {AttributeKind::kInt, AttributeKind::kFloat, AttributeKind::kString,
                                      AttributeKind::kInts, AttributeKind::kFloats};
  return {name, kKinds[value.index()], false, std::move(value), kMinimal ? "" : doc};
}

InputSchema Data(const char* name, const char* doc) {
  return {.name = name, .type = TypeRule::kCodes, .doc = kMinimal ? "" : doc};
}
InputSchema Constant(const char* name, TypeRule type, const char* doc) {
  return {.name = name, .type = type, .constant = true, .doc = kMinimal ? "" : doc};
}
InputSchema OptionalConstant(const char* name, TypeRule type, const char* doc) {
  return {.name = name, .type = type, .constant = true, .optional = true, .doc = kMinimal ? "" : doc};
}

// Attributes that say how the codes of one operand are stored and bounded.
void AddOperand(std::vector<AttributeSchema>& out, const char* bits, const char* encoding,
                const char* what_bits, const char* what_encoding) {
  out.push_back(Optional(bits, int64_t{8}, what_bits));
  out.push_back(Optional(encoding, std::string("unsigned"), what_encoding));
}

void AddOutputRange(std::vector<AttributeSchema>& out) {
  AddOperand(out, "y_bits", "y_encoding", "Bit width of the output codes, 1..8.",
             "`unsigned` (uint8) or `signed` (int8): storage of the output codes.");
  out.push_back(Optional("y_min", Ints{},
                         "One integer: lower clip bound of the output codes (`lo`). Empty: the "
                         "smallest code of y_bits. ReLU and Clip before the quantizer live here."));
  out.push_back(Optional("y_max", Ints{},
                         "One integer: upper clip bound of the output codes (`hi`). Empty: the "
                         "largest code of y_bits."));
}

std::vector<AttributeSchema> MatmulAttributes() {
  std::vector<AttributeSchema> out;
  AddOperand(
      out, "x_bits", "x_encoding",
      "Bit width of the activation codes, 1..8. Of a stored byte that many low bits are read, in two's "
      "complement for signed codes. A node of ai.lowbit that may make other codes is refused.",
      "`unsigned` (uint8 tensor), `signed` (int8 tensor) or `bipolar` (uint8, value 2q-1, 1 bit).");
  AddOperand(out, "w_bits", "w_encoding", "Bit width of the packed weight codes, 1..8.",
             "`unsigned`, `signed` (two's complement in w_bits bits) or `bipolar` (value 2q-1, 1 bit).");
  AddOutputRange(out);
  out.push_back(
      Optional("epilogue", std::string("requantize"), "`requantize`, `float`, `thresholds` or `tail`."));
  out.push_back(Optional("tail", std::string(),
                         "Steps of the `tail` epilogue in order, comma-separated, each at most once: `bias` "
                         "(v + tail_bias[c]), `affine` (v * tail_scale[c], then + tail_shift[c]), `residual` "
                         "(v + f32(r - residual_zero_point) * residual_scale), `relu` (max(v, 0)), `clip` "
                         "(min(max(v, clip_min), clip_max)), `silu` (v * sigmoid(v)), `hardswish` (v * "
                         "min(max(v * f32(1/6) + 0.5, 0), 1))."));
  out.push_back(Optional("clip_min", 0.0f, "Lower bound of the tail's `clip` step."));
  out.push_back(Optional("clip_max", 0.0f, "Upper bound of the tail's `clip` step."));
  out.push_back(Optional("inner_min", Ints{},
                         "With a residual in the `requantize` epilogue, one integer: lower clip "
                         "bound of the inner codes. Empty: 0 or -128 by inner_encoding."));
  out.push_back(Optional("inner_max", Ints{}, "Upper clip bound of the inner codes. Empty: 255 or 127."));
  out.push_back(Optional("inner_encoding", std::string("unsigned"), "Encoding of the inner codes."));
  out.push_back(Optional("residual_encoding", std::string("unsigned"),
                         "`unsigned` (uint8 tensor) or `signed` (int8 tensor)."));
  return out;
}

std::vector<InputSchema> MatmulInputs() {
  using enum TypeRule;
  return {
      Data("x", "Activation codes, channels last."),
      Constant("w", kUInt8,
               "Packed weight codes. Each output channel is one row of K codes in the order (kernel..., "
               "input channel of the group); code i of a row occupies bits [i*w_bits, (i+1)*w_bits) of "
               "the row, least significant bit first; every row starts on a byte. Length: out_channels * "
               "ceil(K * w_bits / 8)."),
      Constant("x_scale", kFloat, "Scalar."),
      Constant("x_zero_point", kInt32, "Scalar, inside the range of x_bits; 0 for bipolar."),
      Constant("w_scale", kFloat, "Scalar, [1] or [out_channels]."),
      Constant("w_zero_point", kInt32,
               "Scalar, [1] or [out_channels], inside the range of w_bits; 0 for bipolar."),
      OptionalConstant("bias", kInt32,
                       "[out_channels], in units of x_scale * w_scale[c]; added to the accumulator."),
      OptionalConstant("y_scale", kFloat,
                       "Scalar. Absent: the output is float32 (epilogues `float` and `tail`)."),
      OptionalConstant("y_zero_point", kInt32, "Scalar; absent: 0."),
      OptionalConstant("thresholds", kInt32,
                       "[out_channels, n], each row sorted so that dir[c] * T[c,k] ascends."),
      OptionalConstant("threshold_base", kInt32, "[out_channels]: the code when no threshold is reached."),
      OptionalConstant("threshold_dir", kInt32, "[out_channels], +1 (y rises with acc) or -1 (y falls)."),
      OptionalConstant("tail_bias", kFloat, "[out_channels], step `bias`."),
      OptionalConstant("tail_scale", kFloat, "[out_channels], step `affine`."),
      OptionalConstant("tail_shift", kFloat, "[out_channels], step `affine`."),
      {.name = "residual",
       .type = kCodes,
       .optional = true,
       .doc = "Codes of the shape of y, added in float32 before the last rounding."},
      OptionalConstant("residual_scale", kFloat, "Scalar."),
      OptionalConstant("residual_zero_point", kInt32, "Scalar."),
      OptionalConstant("inner_scale", kFloat,
                       "Scalar: the convolution's own quantizer when a residual follows it "
                       "(`requantize` epilogue)."),
      OptionalConstant("inner_zero_point", kInt32, "Scalar."),
  };
}

void AddWindow(std::vector<AttributeSchema>& out, bool dilations) {
  out.push_back(Required("kernel_shape", AttributeKind::kInts,
                         "Spatial kernel size, one number per spatial dim: 1, 2 or 3 (depth first)."));
  out.push_back(Optional("strides", Ints{}, "One per spatial dim; empty: 1."));
  out.push_back(Optional("pads", Ints{}, "Begins, then ends, as in ONNX; empty: 0."));
  if (dilations) out.push_back(Optional("dilations", Ints{}, "One per spatial dim; empty: 1."));
}

constexpr const char* kImageDefinition = R"(
What `Image.resize` of Pillow makes of pictures of 8 bits a channel, in these steps:

1. `gray`: a picture of 3 channels becomes `(19595 * r + 38470 * g + 7471 * b + 32768) >> 16`. Otherwise one
   of 1 channel has it three times.
2. The picture is resized, with `S` the length of its shorter side, `L` that of the longer one: `resize=[s]`
   makes them `s` and `floor(f64(s * L) / f64(S))`, `resize=[h, w]` makes H and W `h` and `w`, `letterbox=[h,
   w]` makes them `h` and `clip(floor((2 * W * h + H) / (2 * H)), 1, w)` if `h * W <= w * H`, else
   `clip(floor((2 * H * w + W) / (2 * W)), 1, h)` and `w`. Columns first, then rows, each of them rounded to
   8 bits; rows first where the height loses more than 0 pixels and more than twice as many as the width
   does. (Pillow 13; those before it resize columns first always.)
3. `crop=[h, w]` keeps the rows from `rint((height - h) / 2)` on, half to even, and columns likewise. A
   letterbox has `floor((h - height) / 2)` rows of `fill` above the picture, or none, the rest below; columns
   likewise.
4. `bgr` turns the channels around.
5. `y[.., c] = table[c, pixel[.., c]]`; one row of a table serves all channels.

Resizing `n` pixels to `m`, in float64, each operation rounded once: with `scale = n / m`, `wide = max(scale,
1)`, `support` 1 (bilinear) or 2 (bicubic) times `wide`, pixel `o` is made around `center = (o + 0.5) *
scale` of the pixels from `max(trunc(center - support + 0.5), 0)` to `min(trunc(center + support + 0.5), n) -
1`. Pixel `i` has the weight `f((i - center + 0.5) * (1 / wide))`, divided by the sum of all, added front to
back, if that is not 0. For `|x| < 1` is `f(x) = 1 - |x|` (bilinear) or `f(x) = ((1.5 * |x| - 2.5) * |x|) *
|x| + 1` (bicubic, which for `1 <= |x| < 2` is `(((|x| - 5) * |x| + 8) * |x| - 4) * -0.5`), else 0. The
weights become integers, `w = trunc(2^22 * weight + 0.5)`, or `- 0.5` where they are negative; the pixel is
`clip((sum of w * pixel + 2^21) >> 22, 0, 255)`. `nearest` takes pixel `trunc(p)`, where `p` begins at `scale
* 0.5` and `scale` is added for each pixel. Where `m = n` nothing is done.)";

constexpr const char* kConvDefinition = R"(
With `v(q)` the integer value of a code (`q - zero_point`, or `2q - 1` for bipolar codes), `n` an image, `o` an output
pixel and `c` an output channel:

    acc = sum over taps t and input channels i of the group: v(x[n, o*stride + t*dilation - pad, i]) * v(w[c, t, i])
    acc = acc + bias[c]                                                    exact, int32

A tap outside the image contributes 0 (the real zero, also for bipolar codes). Then one of four epilogues, float32,
each operation rounded once, `rint` half to even, NaN counts as `y_min`:

- `requantize`: `m[c] = f32(f32(x_scale * w_scale[c]) / y_scale)`, `y = clip(rint(f32(acc) * m[c]) + y_zero_point,
  y_min, y_max)`. With a residual the same is done with inner_scale, inner_zero_point, inner_min, inner_max, giving `q`;
  then `s = f32(q - inner_zero_point) * inner_scale + f32(residual - residual_zero_point) * residual_scale` and
  `y = clip(rint(s / y_scale) + y_zero_point, y_min, y_max)`: two roundings, as the graph with its inner
  QuantizeLinear says.
- `float`: `y = f32(acc) * f32(x_scale * w_scale[c])`, float32.
- `thresholds`: `y = threshold_base[c] + #{k : dir[c] * acc >= dir[c] * T[c, k]}`, `dir = threshold_dir`: +1 counts
  the thresholds that acc reaches, -1 (a falling chain, a negative gamma) those that it does not exceed.
- `tail`: `f32(acc) * f32(x_scale * w_scale[c])`, then the steps of `tail` in their order, then, when y_scale is given,
  `clip(rint(v / y_scale) + y_zero_point, y_min, y_max)`; without y_scale the float32 value is the output.

The accumulator must not leave int32 for any codes in range; a node whose weights could is refused.
)";

constexpr const char* kResizeDefinition = R"(
ONNX Resize of the spatial dims. Positions are float32, each operation rounded once, from the left; `o` is an output
index, `scale` the one given or `f32(out / in)`:

- `half_pixel`: `(o + 0.5) / scale - 0.5`; `pytorch_half_pixel` the same, 0 where out is 1;
- `align_corners`: `o * (in - 1) / (out - 1)`, 0 where out is 1;
- `asymmetric`: `o / scale`, with sizes `o * in / out`;
- `half_pixel_symmetric`: `f32(begin + (o + 0.5) / scale - 0.5)`, this sum in float64 as in ONNX Runtime, with
  `begin = in / 2 * (1 - out / (scale * in))`.

In mode `nearest` codes are copied: scale and zero point stay, and the node has no other input than x.

In the modes `linear` and `cubic` every dim in turn, the first one first, becomes a sum over its taps, the first tap
first, of a float32 weight times the number that the dim before gives; the first dim takes `f32(x - x_zero_point)`.
Every product and every sum is rounded once. Then `y = clip(rint(v * f32(x_scale / y_scale)) + y_zero_point, y_min,
y_max)`, NaN counts as y_min.

- `linear`: p is the position, clipped to [0, in - 1], `i = floor(p)`, `f = p - i`; the taps are i and
  `min(i + 1, in - 1)`, their weights `1 - f` and `f`.
- `cubic`: `i = floor(p)`, `f = p - i`, `g = 1 - f`, a is cubic_coeff_a; the taps are i - 1 .. i + 2, those outside
  the image moved to its edge, and their weights, from the left and with `t = f + 1`, `u = g + 1`:
  `((a * t - 5 * a) * t + 8 * a) * t - 4 * a`, `((a + 2) * f - (a + 3)) * f * f + 1`,
  `((a + 2) * g - (a + 3)) * g * g + 1`, `((a * u - 5 * a) * u + 8 * a) * u - 4 * a`. With exclude_outside the weight of
  a tap outside is 0, and every weight is divided by the sum of the four.
)";

constexpr const char* kSoftmaxDefinition = R"(
With `m` the largest code of a row along the axis:

    e = table[m - x]                     S = sum of e over the row, exact
    g = f32(1 / f32(f32(S) * y_scale))   y = clip(rint(f32(e) * g) + y_zero_point, y_min, y_max)

The table says what the function is; the converter writes `rint(exp(-d * x_scale) * 2^24)`. x_scale and x_zero_point
tell what the codes stand for, nothing else reads them. NaN counts as y_min.
)";

std::vector<OpSchema> BuildSchemas() {
  using enum TypeRule;
  std::vector<OpSchema> ops;

  auto conv_attributes = MatmulAttributes();
  AddWindow(conv_attributes, true);
  conv_attributes.push_back(Required("in_channels", AttributeKind::kInt, "Channels of x."));
  conv_attributes.push_back(Required("out_channels", AttributeKind::kInt, "Channels of y."));
  conv_attributes.push_back(Optional("group", int64_t{1}, "Divides in_channels and out_channels."));
  auto add_conv = [&](const char* name, const char* summary) {
    ops.push_back({name, summary, Doc(kConvDefinition), MatmulInputs(),
                   Doc("[N, D1.., out_channels], channels last."), kCodesOrFloat, conv_attributes});
  };
  if constexpr (HasOp("LowBitConv"))
    add_conv("LowBitConv",
             Doc("1-D, 2-D or 3-D convolution of 1..8-bit codes, channels last, with a fused epilogue."));
  if constexpr (HasOp("APConv"))
    add_conv("APConv",
             Doc("The same op as LowBitConv under the name that the arbitrary-precision papers use; written "
                 "where an operand "
                 "is bipolar or the user asks for it. Either name may run any kernel."));

  auto transpose_attributes = conv_attributes;
  for (AttributeSchema& attribute : transpose_attributes) {
    if (std::string_view(attribute.name) == "kernel_shape")
      attribute.doc = Doc("Spatial kernel size, 1 or 2 numbers.");
  }
  transpose_attributes.push_back(Optional("output_padding", Ints{}, "One per spatial dim; empty: 0."));
  if constexpr (HasOp("LowBitConvTranspose"))
    ops.push_back(
        {"LowBitConvTranspose", Doc("1-D or 2-D transposed convolution of 1..8-bit codes, channels last."),
         Doc("The accumulator of output pixel `p` sums `v(x[n, o, i]) * v(w[c, t, i])` over all `o, t` with "
             "`o * stride + t * dilation - pad == p`. Weight rows are stored per output channel, as in "
             "LowBitConv "
             "(not per input channel as in ONNX). Epilogues as in LowBitConv."),
         MatmulInputs(), Doc("[N, D1.., out_channels], channels last."), kCodesOrFloat,
         transpose_attributes});

  auto gemm_attributes = MatmulAttributes();
  gemm_attributes.push_back(Required("in_features", AttributeKind::kInt, "K: length of a weight row."));
  gemm_attributes.push_back(Required("out_features", AttributeKind::kInt, "Number of weight rows."));
  gemm_attributes.push_back(Optional("axis", int64_t{-1},
                                     "Dims of x from `axis` on are flattened into K; y has x's "
                                     "dims before `axis`, then out_features."));
  auto add_gemm = [&](const char* name) {
    ops.push_back({name, Doc("Matrix product of 1..8-bit codes with constant weights and a fused epilogue."),
                   Doc("`acc[m, c] = sum over k of v(x[m, k]) * v(w[c, k]) + bias[c]`, exact int32; "
                       "`out_channels` below is "
                       "out_features. Epilogues as in LowBitConv. A Gemm's alpha is folded into x_scale as "
                       "`f32(alpha * x_scale)`."),
                   MatmulInputs(), Doc("[..., out_features]"), kCodesOrFloat, gemm_attributes});
  };
  if constexpr (HasOp("LowBitGemm")) add_gemm("LowBitGemm");
  if constexpr (HasOp("APGemm")) add_gemm("APGemm");

  auto unary = [&](std::vector<AttributeSchema> extra = {}) {
    std::vector<AttributeSchema> out;
    out.push_back(Optional("x_encoding", std::string("unsigned"), "`unsigned` (uint8) or `signed` (int8)."));
    AddOutputRange(out);
    for (auto& a : extra) out.push_back(std::move(a));
    return out;
  };
  const InputSchema x = Data("x", "Codes.");
  const InputSchema x_scale = Constant("x_scale", kFloat, "Scalar.");
  const InputSchema x_zero = Constant("x_zero_point", kInt32, "Scalar.");
  const InputSchema y_scale = Constant("y_scale", kFloat, "Scalar.");
  const InputSchema y_zero = Constant("y_zero_point", kInt32, "Scalar.");
  const InputSchema optional_y_scale = OptionalConstant("y_scale", kFloat, "Scalar. Absent: float32 output.");
  const InputSchema optional_y_zero = OptionalConstant("y_zero_point", kInt32, "Scalar; absent: 0.");

  if constexpr (HasOp("LowBitAffine"))
    ops.push_back(
        {"LowBitAffine",
         Doc("Per-channel multiply and add on codes, channels last."),
         Doc("`v = f32(f32(f32(x - x_zero_point) * x_scale) * scale[c]) + shift[c]`; "
             "`y = clip(rint(v / y_scale) + y_zero_point, y_min, y_max)`, or v itself without y_scale."),
         {x, x_scale, x_zero, Constant("scale", kFloat, "[C] or scalar."),
          Constant("shift", kFloat, "[C] or scalar."), optional_y_scale, optional_y_zero},
         Doc("Shape of x."),
         kCodesOrFloat,
         unary()});

  if constexpr (HasOp("LowBitLookup"))
    ops.push_back(
        {"LowBitLookup",
         Doc("A 256-entry table: any unary function between two quantized tensors."),
         Doc("`y = table[u]` with u the byte of the code (for int8 codes its two's complement pattern). With "
             "a "
             "[C, 256] table row c serves channel c (last dim). Table bytes are the output codes' bytes."),
         {x, Constant("table", kUInt8, "[256] or [C, 256].")},
         Doc("Shape of x."),
         kCodes,
         {Optional("x_encoding", std::string("unsigned"), "`unsigned` (uint8) or `signed` (int8)."),
          Optional("y_encoding", std::string("unsigned"), "`unsigned` (uint8) or `signed` (int8).")}});

  auto binary = [&] {
    std::vector<AttributeSchema> out;
    out.push_back(Optional("a_encoding", std::string("unsigned"), "`unsigned` (uint8) or `signed` (int8)."));
    out.push_back(Optional("b_encoding", std::string("unsigned"), "`unsigned` (uint8) or `signed` (int8)."));
    AddOutputRange(out);
    return out;
  };
  const std::vector<InputSchema> binary_inputs = {Data("a", "Codes."),
                                                  Constant("a_scale", kFloat, "Scalar."),
                                                  Constant("a_zero_point", kInt32, "Scalar."),
                                                  Data("b", "Codes; numpy broadcasting with a."),
                                                  Constant("b_scale", kFloat, "Scalar."),
                                                  Constant("b_zero_point", kInt32, "Scalar."),
                                                  optional_y_scale,
                                                  optional_y_zero};
  if constexpr (HasOp("LowBitAdd")) {
    auto add_inputs = binary_inputs;
    add_inputs.push_back(OptionalConstant(
        "b_table", kFloat,
        "[256], finite: the real numbers of b's bytes (for int8 codes their two's complement "
        "patterns), in place of those that b_scale and b_zero_point give them."));
    ops.push_back(
        {"LowBitAdd", Doc("Sum of two quantized tensors, rounded once."),
         Doc("`v = f32(a - a_zero_point) * a_scale + f32(b - b_zero_point) * b_scale`, or with b_table `v = "
             "f32(a - a_zero_point) * a_scale + b_table[b]`: a function of b that is not rounded itself; "
             "`y = clip(rint(v / y_scale) + y_zero_point, y_min, y_max)`, or v itself without y_scale."),
         add_inputs, Doc("The broadcast shape."), kCodesOrFloat, binary()});
  }
  if constexpr (HasOp("LowBitMul"))
    ops.push_back(
        {"LowBitMul", Doc("Product of two quantized tensors, rounded once."),
         Doc("`v = (f32(a - a_zero_point) * a_scale) * (f32(b - b_zero_point) * b_scale)`; "
             "`y = clip(rint(v / y_scale) + y_zero_point, y_min, y_max)`, or v itself without y_scale."),
         binary_inputs, Doc("The broadcast shape."), kCodesOrFloat, binary()});

  if constexpr (HasOp("LowBitMatMul")) {
    auto matmul = binary();
    matmul.push_back(Optional("a_perm", Ints{},
                              "The product reads a with its dims permuted so, as ONNX's Transpose has it; "
                              "empty: as they are."));
    matmul.push_back(Optional("b_perm", Ints{}, "The same for b."));
    auto matmul_inputs = binary_inputs;
    matmul_inputs[0].doc = Doc("Codes, rank 2 or more.");
    matmul_inputs[3].doc =
        Doc("Codes, rank 2 or more; the dims before the last two broadcast with those of a.");
    ops.push_back(
        {"LowBitMatMul", Doc("Matrix product of two quantized tensors, both fed, with one rounding."),
         Doc("`A` is a with its dims permuted by a_perm, `B` is b with b_perm. `acc[m, n] = sum over k of "
             "(A[m, k] - a_zero_point) * (B[k, n] - b_zero_point)`, exact int32; `m = f32(f32(a_scale * "
             "b_scale) / y_scale)`, `y = clip(rint(f32(acc) * m) + y_zero_point, y_min, y_max)`; without "
             "y_scale `y = f32(acc) * f32(a_scale * b_scale)`. More products in a sum than int32 surely "
             "holds "
             "are refused when the node runs: 33025 with zero points at the end of the codes, 131072 in "
             "their "
             "middle."),
         matmul_inputs, Doc("[..., rows of A, columns of B]"), kCodesOrFloat, matmul});
  }

  std::vector<AttributeSchema> max_pool = {Optional(
      "x_encoding", std::string("unsigned"), "`unsigned` (uint8) or `signed` (int8); y has the same.")};
  AddWindow(max_pool, true);
  max_pool.push_back(Optional("ceil_mode", int64_t{0}, "1: round the output size up, as in ONNX."));
  if constexpr (HasOp("LowBitMaxPool"))
    ops.push_back({"LowBitMaxPool",
                   Doc("Maximum of the codes of a window, channels last."),
                   Doc("The largest code in the window; taps outside the image do not take part."),
                   {x},
                   Doc("[N, D1.., C]"),
                   kCodes,
                   max_pool});

  auto average_pool = unary();
  AddWindow(average_pool, false);
  average_pool.push_back(Optional("ceil_mode", int64_t{0}, "1: round the output size up, as in ONNX."));
  average_pool.push_back(
      Optional("count_include_pad", int64_t{0}, "1: taps in the padding count in the divisor."));
  if constexpr (HasOp("LowBitAveragePool"))
    ops.push_back(
        {"LowBitAveragePool",
         Doc("Average of a window of quantized values, channels last."),
         Doc("`s = sum over w of (sum over h of f32(x - x_zero_point) * x_scale)` in float32, each "
             "column summed from "
             "the top, columns from the left, `v = s / f32(n)`, n the number of taps that count; "
             "`y = clip(rint(v / y_scale) + y_zero_point, y_min, y_max)`, or v itself without y_scale."),
         {x, x_scale, x_zero, optional_y_scale, optional_y_zero},
         Doc("[N, D1.., C]"),
         kCodesOrFloat,
         average_pool});

  auto global_pool = unary();
  global_pool.push_back(Optional("keepdims", int64_t{1}, "1: y is [N, 1.., C]; 0: [N, C]."));
  if constexpr (HasOp("LowBitGlobalAveragePool"))
    ops.push_back(
        {"LowBitGlobalAveragePool",
         Doc("Average over all spatial positions, channels last."),
         Doc("`S = sum over pixels of (x - x_zero_point)`, exact; with y_scale `m = x_scale / f32(y_scale * "
             "f32(pixels))`, `y = clip(rint(f32(S) * m) + y_zero_point, y_min, y_max)`; without it "
             "`y = f32(S) * f32(x_scale / f32(pixels))`."),
         {x, x_scale, x_zero, optional_y_scale, optional_y_zero},
         Doc("[N, 1.., C] or [N, C]"),
         kCodesOrFloat,
         global_pool});

  std::vector<AttributeSchema> concat;
  AddOutputRange(concat);
  concat.push_back(
      Required("axis", AttributeKind::kInt, "The axis of the channels-last tensors; may be negative."));
  concat.push_back(
      Optional("x_encodings", std::string(), "Comma-separated encoding per input; empty: all unsigned."));
  if constexpr (HasOp("LowBitConcat"))
    ops.push_back(
        {"LowBitConcat",
         Doc("Concatenation of quantized tensors, each requantized to the output's parameters."),
         Doc("`y = clip(rint((f32(x_i - x_zero_points[i]) * x_scales[i]) / y_scale) + y_zero_point, "
             "y_min, y_max)`; "
             "an input whose scale, zero point and encoding are the output's is copied "
             "unless y_min or y_max is given."),
         {Constant("x_scales", kFloat, "[n]."),
          Constant("x_zero_points", kInt32, "[n]."),
          y_scale,
          y_zero,
          {.name = "x", .type = kCodes, .variadic = true, .doc = "n tensors of codes."}},
         Doc("Concatenated along axis."),
         kCodes,
         concat});

  auto normalization = unary();
  normalization.push_back(Optional("axis", int64_t{-1},
                                   "The dims of x from `axis` on are normalized together; may be negative."));
  normalization.push_back(Optional("groups", int64_t{1},
                                   "Parts of the last of these dims, the channels, each with a mean and a "
                                   "variance of its own."));
  normalization.push_back(Optional("epsilon", 1e-5f, "Added to the variance, above 0."));
  if constexpr (HasOp("LowBitNormalization"))
    ops.push_back(
        {"LowBitNormalization",
         Doc("Layer, group and instance normalization of codes, channels last, rounded once."),
         Doc("Over the n elements q of a part, `S1 = sum of (q - x_zero_point)` and `S2 = sum of (q - "
             "x_zero_point)^2`, exact. Once per part, in float64, each operation rounded once: `mean = "
             "f32(S1 / "
             "n)`, `gain = f32(x_scale / sqrt(x_scale * x_scale * (n * S2 - S1 * S1) / (n * n) + epsilon))`, "
             "`n * S2 - S1 * S1` an exact integer. Then in float32 `v = f32(f32(f32(f32(q - x_zero_point) - "
             "mean) * gain) * gamma) + beta`; `y = clip(rint(v / y_scale) + y_zero_point, y_min, y_max)`, or "
             "v "
             "itself without y_scale. n is at most 2^23."),
         {x, x_scale, x_zero,
          Constant("gamma", kFloat,
                   "One element, one per channel (last dim), or, in one group, one per normalized element."),
          Constant("beta", kFloat, "As gamma."), optional_y_scale, optional_y_zero},
         Doc("Shape of x."),
         kCodesOrFloat,
         normalization});

  std::vector<AttributeSchema> resize = {
      Optional("x_encoding", std::string("unsigned"),
               "`unsigned` (uint8) or `signed` (int8); y the same in mode nearest."),
      Optional("scales", Floats{}, "One per spatial dim; output size floor(size * scale)."),
      Optional("sizes", Ints{}, "Output size per spatial dim; used when scales is empty."),
      Optional("coordinate_transformation_mode", std::string("half_pixel"),
               "half_pixel, pytorch_half_pixel, align_corners, asymmetric or half_pixel_symmetric."),
      Optional("nearest_mode", std::string("round_prefer_floor"),
               "round_prefer_floor, round_prefer_ceil, floor or ceil."),
      Optional("mode", std::string("nearest"), "nearest, linear or cubic."),
      Optional("cubic_coeff_a", -0.75f, "The a of mode cubic, within -16..16."),
      Optional("exclude_outside", int64_t{0}, "1, in mode cubic: taps outside the image have no weight.")};
  AddOutputRange(resize);
  if constexpr (HasOp("LowBitResize"))
    ops.push_back({"LowBitResize",
                   Doc("Resize of codes, channels last."),
                   Doc(kResizeDefinition),
                   {x, OptionalConstant("x_scale", kFloat, "Scalar; in the modes that compute."),
                    OptionalConstant("x_zero_point", kInt32, "Scalar; absent: 0."),
                    OptionalConstant("y_scale", kFloat, "Scalar; in the modes that compute."),
                    OptionalConstant("y_zero_point", kInt32, "Scalar; absent: 0.")},
                   Doc("[N, D1.., C]"),
                   kCodes,
                   resize});

  if constexpr (HasOp("LowBitImage"))
    ops.push_back(
        {"LowBitImage",
         Doc("Pixels of pictures of any size, resized and cut to shape, to codes."),
         Doc(kImageDefinition),
         {{.name = "x", .type = kUInt8, .doc = kMinimal ? "" : "[N, H, W, C], C 3 (RGB) or 1 (gray)."},
          Constant("table", kUInt8, "[256] or [channels of y, 256]: the bytes of the codes.")},
         Doc("[N, height, width, 3], or 1 channel where order is gray."),
         kCodes,
         {Optional(
              "resize", Ints{},
              "One number: the length that the shorter side gets. Two: height and width. Empty: the size "
              "stays."),
          Optional("letterbox", Ints{},
                   "Instead of resize and crop, height and width into which the picture fits, its sides in "
                   "proportion."),
          Optional("centered", int64_t{1},
                   "0: a picture in a letterbox begins in the corner at the top left."),
          Optional("fill", int64_t{0}, "The value of the pixels around it, 0..255."),
          Optional("crop", Ints{}, "Height and width of the middle that is kept. Empty: all is."),
          Optional("interpolation", std::string("bilinear"), "bilinear, bicubic or nearest."),
          Optional("order", std::string("rgb"), "rgb, bgr or gray."),
          Optional("y_encoding", std::string("unsigned"), "`unsigned` (uint8) or `signed` (int8).")}});

  if constexpr (HasOp("LowBitDepthToSpace"))
    ops.push_back({"LowBitDepthToSpace",
                   Doc("Blocks of channels become blocks of pixels, channels last; codes only move."),
                   Doc("ONNX DepthToSpace, b its blocksize: `y[n, h*b + i, w*b + j, c] = x[n, h, w, k]` with "
                       "`k = (i*b + j) * C + c` (mode DCR) or `k = c * b*b + i*b + j` (mode CRD)."),
                   {x},
                   Doc("[N, H * blocksize, W * blocksize, C]"),
                   kCodes,
                   {Optional("x_encoding", std::string("unsigned"),
                             "`unsigned` (uint8) or `signed` (int8); y the same."),
                    Required("blocksize", AttributeKind::kInt, "x has C * blocksize^2 channels."),
                    Optional("mode", std::string("DCR"), "DCR or CRD.")}});

  auto softmax = unary();
  softmax.push_back(
      Optional("axis", int64_t{-1}, "The axis of x whose entries add up to 1; may be negative."));
  if constexpr (HasOp("LowBitSoftmax"))
    ops.push_back(
        {"LowBitSoftmax",
         Doc("Softmax between two quantized tensors."),
         Doc(kSoftmaxDefinition),
         {x, x_scale, x_zero, Constant("table", kInt32, "[256], each within 0..2^24, the first at least 1."),
          y_scale, y_zero},
         Doc("Shape of x."),
         kCodes,
         softmax});

  if constexpr (HasOp("LowBitRequantize"))
    ops.push_back(
        {"LowBitRequantize",
         Doc("From one quantization grid to another."),
         Doc("`y = clip(rint((f32(x - x_zero_point) * x_scale) / y_scale) + y_zero_point, y_min, y_max)`."),
         {x, Constant("x_scale", kFloat, "Scalar or [C] (last dim)."),
          Constant("x_zero_point", kInt32, "Scalar or [C]."), Constant("y_scale", kFloat, "Scalar or [C]."),
          Constant("y_zero_point", kInt32, "Scalar or [C].")},
         Doc("Shape of x."),
         kCodes,
         unary()});

  std::vector<AttributeSchema> quantize;
  AddOutputRange(quantize);
  quantize.push_back(Optional("to_channels_last", int64_t{0}, "1: x is [N, C, D1..], y is [N, D1.., C]."));
  if constexpr (HasOp("LowBitQuantize"))
    ops.push_back({"LowBitQuantize",
                   Doc("QuantizeLinear that can also move channels last."),
                   Doc("`y = clip(rint(x / y_scale) + y_zero_point, y_min, y_max)`, real float32 division, "
                       "NaN gives y_min."),
                   {{.name = "x", .type = kFloat, .doc = "float32."},
                    Constant("y_scale", kFloat, "Scalar or [C]."),
                    Constant("y_zero_point", kInt32, "Scalar or [C].")},
                   Doc("Codes, channels last when to_channels_last is set."),
                   kCodes,
                   quantize});

  std::vector<AttributeSchema> threshold;
  AddOperand(threshold, "y_bits", "y_encoding", "Bit width of the output codes, 1..8.",
             "`unsigned` (uint8) or `signed` (int8): storage of the output codes.");
  threshold.push_back(Optional("to_channels_last", int64_t{0}, "1: x is [N, C, D1..], y is [N, D1.., C]."));
  if constexpr (HasOp("LowBitThreshold"))
    ops.push_back(
        {"LowBitThreshold",
         Doc("Counts thresholds: any monotone quantizer of a float tensor into few codes."),
         Doc("`y = base[c] + #{k : dir[c] * x >= dir[c] * thresholds[c, k]}`, compared in float32: dir +1 "
             "counts "
             "the "
             "thresholds that x reaches, -1 those that it does not exceed. NaN gives base. Channels c are "
             "the last "
             "dim of y."),
         {{.name = "x", .type = kFloat, .doc = "float32."},
          Constant("thresholds", kFloat,
                   "[C, n] or [1, n], n in 1..255, each row sorted so that dir[c] * T[c,k] ascends. An "
                   "infinity is a threshold that every number reaches, or none but itself; NaN is refused."),
          Constant("base", kInt32, "Scalar or [C]: the smallest code. base + n is a code of y_bits too."),
          Constant("dir", kInt32, "Scalar or [C], +1 (y rises with x) or -1 (y falls).")},
         Doc("Codes, channels last when to_channels_last is set."),
         kCodes,
         threshold});

  if constexpr (HasOp("LowBitDequantize"))
    ops.push_back({"LowBitDequantize",
                   Doc("DequantizeLinear that can also move channels first."),
                   Doc("`y = f32(x - x_zero_point) * x_scale`."),
                   {x, Constant("x_scale", kFloat, "Scalar or [C]."),
                    Constant("x_zero_point", kInt32, "Scalar or [C].")},
                   Doc("float32, channels first when to_channels_first is set."),
                   kFloat,
                   {Optional("x_encoding", std::string("unsigned"), "`unsigned` (uint8) or `signed` (int8)."),
                    Optional("to_channels_first", int64_t{0}, "1: x is [N, D1.., C], y is [N, C, D1..].")}});
  return ops;
}

void RequireKnownVersion(const OpSchema& schema, const AttributeValue& value) {
  const int64_t* version = std::get_if<int64_t>(&value);
  Require(version != nullptr, schema.name, ": attribute '", kNeedsVersion, "' is not an int");
  Require(*version <= kDomainVersion, schema.name, ": the node needs version ", *version, " of the op set ",
          kDomain, ", this lowbit knows version ", kDomainVersion, "; update lowbit");
}

}  // namespace

std::span<const OpSchema> OpSchemas() {
  // Never destroyed: the ops of a session point into it, and a session may outlive static destructors.
  static const auto& schemas = *new std::vector<OpSchema>(BuildSchemas());
  return schemas;
}

const OpSchema* FindOpSchema(std::string_view name) {
  const auto schemas = OpSchemas();
  const auto it =
      std::find_if(schemas.begin(), schemas.end(), [&](const OpSchema& s) { return s.name == name; });
  return it == schemas.end() ? nullptr : &*it;
}

const AttributeSchema* FindAttribute(const OpSchema& schema, std::string_view name) {
  const auto it = std::find_if(schema.attributes.begin(), schema.attributes.end(),
                               [&](const AttributeSchema& a) { return a.name == name; });
  return it == schema.attributes.end() ? nullptr : &*it;
}

AttributeMap CompleteAttributes(const OpSchema& schema, const AttributeMap& given) {
  static constexpr const char* kKindNames[] = {"an int", "a float", "a string", "a list of ints",
                                               "a list of floats"};
  AttributeMap out;
  for (const auto& [name, value] : given) {
    if (name == kNeedsVersion) RequireKnownVersion(schema, value);
    const AttributeSchema* attribute = FindAttribute(schema, name);
    if (attribute == nullptr) continue;
    const auto kind = static_cast<size_t>(attribute->kind);
    Require(value.index() == kind, schema.name, ": attribute '", name, "' must be ", kKindNames[kind],
            ", got ", kKindNames[value.index()]);
    out.emplace(name, value);
  }
  for (const auto& attribute : schema.attributes) {
    if (out.count(attribute.name) != 0) continue;
    Require(!attribute.required, schema.name, ": attribute '", attribute.name, "' is missing");
    out.emplace(attribute.name, attribute.default_value);
  }
  return out;
}

}  // namespace lowbit
