// FFI handlers of the CUDA kernels: decode, check, call.

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "cc/cuda/attention/attention.h"
#include "cc/cuda/attention/head_cuts.h"
#include "cc/cuda/attention/term_gradients.h"
#include "cc/cuda/launch.h"
#include "cc/ffi/attention_bindings.h"
#include "cc/ffi/attention_checks.h"
#include "cc/ffi/cuda_error.h"
#include "cc/ffi/handlers.h"

namespace jax_magi {
namespace {

namespace ffi = xla::ffi;

std::string SmOf(int compute_capability) { return "sm_" + std::to_string(compute_capability); }

// Checks the stamp of a tile list, or the stamp that a list is to be made for.
ffi::Error CheckStamp(const std::string& context, int32_t stamp, int32_t expected) {
  if (stamp == expected) return ffi::Error::Success();
  const auto of = [](int32_t stamp) { return cuda::Tiling::OfStamp(stamp).architecture; };
  if (of(stamp) != of(expected)) {
    return ffi::Error::InvalidArgument(context + ": the tile list was made for the kernels for " +
                                       WordsOf(of(stamp)) + ", and this call's are those for " +
                                       WordsOf(of(expected)) + "; trace or export it again");
  }
  return ffi::Error::InvalidArgument(
      context + ": the program has a tile list of another version of jax_magi (stamp " +
      std::to_string(stamp) + ", expected " + std::to_string(expected) +
      "); trace or export it again");
}

// Parses what the program was compiled for, and checks that this device is such a GPU.
ffi::Error DecodeTarget(const std::string& context, std::string_view name,
                        int32_t shared_memory_bytes, Target* target) {
  const std::optional<Architecture> architecture = ArchitectureOf(name);
  if (!architecture || *architecture == Architecture::kNone) {
    return Invalid(context.c_str(), "architecture", "is unknown: " + std::string(name));
  }
  *target = {*architecture, shared_memory_bytes};
  int compute_capability, most;
  cudaError_t code = cuda::GetComputeCapability(&compute_capability);
  if (code == cudaSuccess) {
    code = cuda::GetAttribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, &most);
  }
  if (code != cudaSuccess) return ToError(context, cuda::FailureOf(code, __FILE__, __LINE__));
  const std::string was_compiled =
      context + ": this program was compiled for " + WordsOf(*architecture);
  if (!RunsOn(*architecture, compute_capability)) {
    const bool is_older = !RunsOn(Architecture::kSm80, compute_capability);
    return ffi::Error::InvalidArgument(
        was_compiled + "; the GPU is " + SmOf(compute_capability) +
        (is_older ? ": compile it there, and it takes the plain path"
                  : ": compile it there, or pass implementation=\"cuda_sm80\""));
  }
  if (shared_memory_bytes > most) {
    return ffi::Error::InvalidArgument(
        was_compiled + " with " + std::to_string(shared_memory_bytes >> 10) +
        " KB of shared memory; the GPU, " + SmOf(compute_capability) + ", has " +
        std::to_string(most >> 10) + " KB: compile it there");
  }
  return ffi::Error::Success();
}

// Checks what only the GPU kernels require, and makes the launch options.
ffi::Error DecodeOptions(const std::string& context, const AttentionCall& call, int num_dkv_parts,
                         ffi::AnyBuffer tile_list, ffi::AnyBuffer workspace, int32_t sm_margin,
                         int32_t tile_stamp, cudaStream_t stream, cuda::LaunchOptions* options) {
  const cuda::CallLayout layout = cuda::LayoutOf(call, num_dkv_parts);
  if (call.shape.head_dim % 8 || call.shape.value_dim % 8) {
    return ffi::Error::InvalidArgument(context + ": head dims must be multiples of 8 on CUDA");
  }
  const int32_t stamp = tile_stamp % cuda::kBlocksStamp;
  const bool in_clusters =
      layout.cluster_tiling.num_rows > 0 && stamp == layout.cluster_tiling.stamp();
  // If no kernel was built, the launch reports it.
  if (layout.tiling.num_rows > 0) {
    if (!in_clusters) JAX_MAGI_RETURN_IF_ERROR(CheckStamp(context, stamp, layout.tiling.stamp()));
    if (tile_list.size_bytes() < sizeof(cuda::TileList)) {
      return Invalid(context.c_str(), "tile_list", "is missing");
    }
  }
  const cuda::Tiling& tiling = in_clusters ? layout.cluster_tiling : layout.tiling;
  const int64_t num_blocks = cuda::BlocksOfStamp(tile_stamp);
  const int64_t list_bytes = static_cast<int64_t>(tile_list.size_bytes());
  int64_t max_tiles = 0;
  if (layout.tiling.num_rows > 0) {
    // The header of a list is checked when the call runs; the size is known here. The list of an
    // unknown mask has room for twice as many tiles, to sort them.
    max_tiles = (list_bytes - static_cast<int64_t>(sizeof(cuda::TileList))) /
                static_cast<int64_t>(sizeof(cuda::Tile));
    const int64_t most = cuda::MaxTiles(call.shape, tiling);
    const bool is_made_by_device = list_bytes == cuda::TileListBytes(call.shape, tiling);
    // Not by the stamp alone: with more blocks than the kernels count, a call would never end.
    const bool is_list_known = num_blocks > 0 && !is_made_by_device;
    const std::string too_large = cuda::TooLarge(call.shape, tiling, is_list_known);
    if (!too_large.empty()) return ffi::Error::InvalidArgument(context + ": " + too_large);
    if (max_tiles > most && !is_made_by_device) {
      return Invalid(context.c_str(), "tile_list",
                     "is of another call: it has " + std::to_string(max_tiles) +
                         " tiles, and there may be " + std::to_string(most));
    }
    if (is_made_by_device) max_tiles = most;
  }
  if (static_cast<int64_t>(workspace.size_bytes()) < layout.workspace_bytes) {
    return ffi::Error::InvalidArgument(context + ": workspace is too small");
  }
  int num_sms;
  if (const cudaError_t code = cuda::GetNumSms(&num_sms); code != cudaSuccess) {
    return ToError(context, cuda::FailureOf(code, __FILE__, __LINE__));
  }
  *options = {static_cast<const cuda::TileList*>(tile_list.untyped_data()), max_tiles, num_blocks,
              in_clusters,
              // The stamp of a known list holds its number of blocks. A list without blocks is
              // never cut.
              layout.cuts_heads && num_dkv_parts == 1 &&
                  cuda::CutsHeads(call, /*is_mask_known=*/num_blocks > 0),
              workspace.untyped_data(), static_cast<int64_t>(workspace.size_bytes()), num_sms,
              sm_margin, stream, call.target};
  return ffi::Error::Success();
}

ffi::Error Forward(cudaStream_t stream, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                   ffi::AnyBuffer slices, ffi::AnyBuffer sink, ffi::AnyBuffer bias,
                   ffi::AnyBuffer alibi_slopes, ffi::AnyBuffer tile_list,
                   ffi::RemainingArgs running, ffi::Result<ffi::AnyBuffer> out,
                   ffi::Result<ffi::AnyBuffer> lse, ffi::Result<ffi::AnyBuffer> max_logits,
                   ffi::Result<ffi::AnyBuffer> workspace, float softmax_scale, float softcap,
                   int32_t sm_margin, int32_t tile_stamp, std::string_view architecture,
                   int32_t shared_memory_bytes) {
  const char* context = "jax_magi attention forward";
  ForwardArgs args;
  JAX_MAGI_RETURN_IF_ERROR(DecodeForward(q, k, v, slices, sink, bias, alibi_slopes, running, *out,
                                         *lse, *max_logits, softmax_scale, softcap, &args));
  JAX_MAGI_RETURN_IF_ERROR(CheckAligned(context, {{"q", q},
                                                  {"k", k},
                                                  {"v", v},
                                                  {"slices", slices},
                                                  {"sink", sink},
                                                  {"bias", bias},
                                                  {"alibi_slopes", alibi_slopes},
                                                  {"tile_list", tile_list},
                                                  {"out", *out},
                                                  {"lse", *lse},
                                                  {"max_logits", *max_logits},
                                                  {"workspace", *workspace}}));
  Target target;
  JAX_MAGI_RETURN_IF_ERROR(DecodeTarget(context, architecture, shared_memory_bytes, &target));
  cuda::LaunchOptions options;
  JAX_MAGI_RETURN_IF_ERROR(DecodeOptions(context, CallOf(args, target), /*num_dkv_parts=*/1,
                                         tile_list, *workspace, sm_margin, tile_stamp, stream,
                                         &options));
  return ToError(context, cuda::AttentionForward(args, options));
}

ffi::Error Backward(cudaStream_t stream, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                    ffi::AnyBuffer dout, ffi::AnyBuffer lse, ffi::AnyBuffer delta,
                    ffi::AnyBuffer slices, ffi::AnyBuffer bias, ffi::AnyBuffer alibi_slopes,
                    ffi::AnyBuffer tile_list, ffi::RemainingArgs running,
                    ffi::Result<ffi::AnyBuffer> dq, ffi::Result<ffi::AnyBuffer> dk,
                    ffi::Result<ffi::AnyBuffer> dv, ffi::Result<ffi::AnyBuffer> dbias,
                    ffi::Result<ffi::AnyBuffer> dslopes, ffi::Result<ffi::AnyBuffer> workspace,
                    float softmax_scale, float softcap, bool deterministic, int32_t sm_margin,
                    int32_t tile_stamp, std::string_view architecture, int32_t shared_memory_bytes,
                    int32_t num_dkv_parts) {
  const char* context = "jax_magi attention backward";
  BackwardArgs args;
  JAX_MAGI_RETURN_IF_ERROR(DecodeBackward(q, k, v, dout, lse, delta, slices, bias, alibi_slopes,
                                          running, *dq, *dk, *dv, *dbias, *dslopes,
                                          /*is_dq_summed=*/false, softmax_scale, softcap, &args));
  JAX_MAGI_RETURN_IF_ERROR(CheckAligned(context, {{"q", q},
                                                  {"k", k},
                                                  {"v", v},
                                                  {"dout", dout},
                                                  {"lse", lse},
                                                  {"delta", delta},
                                                  {"slices", slices},
                                                  {"bias", bias},
                                                  {"alibi_slopes", alibi_slopes},
                                                  {"tile_list", tile_list},
                                                  {"dq", *dq},
                                                  {"dk", *dk},
                                                  {"dv", *dv},
                                                  {"dbias", *dbias},
                                                  {"dslopes", *dslopes},
                                                  {"workspace", *workspace}}));
  Target target;
  JAX_MAGI_RETURN_IF_ERROR(DecodeTarget(context, architecture, shared_memory_bytes, &target));
  const AttentionCall call = CallOf(args, deterministic, target);
  const int64_t most_parts = args.shape.num_kv_heads == 0 ? 1 : args.shape.group();
  if (num_dkv_parts < 1 || num_dkv_parts > std::max<int64_t>(most_parts, 1) ||
      most_parts % num_dkv_parts != 0) {
    return Invalid(context, "num_dkv_parts",
                   "must divide the number of query heads of a kv head, " +
                       std::to_string(most_parts) + ", got " + std::to_string(num_dkv_parts));
  }
  if (call.wants_dbias) {
    const bool is_summed = cuda::IsDbiasSummed(args.shape, args.bias_layout, args.dtype);
    if (is_summed && args.dbias_dtype != DType::kF32) {
      return Invalid(context, "dbias", "must be float32, as it is summed in memory");
    }
    if (!is_summed && !cuda::IsBiasByKey(args.shape, args.bias_layout) &&
        args.dbias_dtype != args.dtype) {
      return Invalid(context, "dbias", "must be of the bias's type");
    }
  }
  cuda::LaunchOptions options;
  JAX_MAGI_RETURN_IF_ERROR(DecodeOptions(context, call, num_dkv_parts, tile_list, *workspace,
                                         sm_margin, tile_stamp, stream, &options));
  return ToError(context, cuda::AttentionBackward(args, num_dkv_parts, deterministic, options));
}

ffi::Error FinishDq(cudaStream_t stream, ffi::AnyBuffer sum, ffi::Result<ffi::AnyBuffer> dq,
                    float softmax_scale) {
  const char* context = "jax_magi attention finish dq";
  const auto sum_dims = sum.dimensions(), dims = dq->dimensions();
  if (sum_dims.size() != 3) return Invalid(context, "sum", "must have 3 dimensions");
  if (dims.size() != 4) return Invalid(context, "dq", "must have 4 dimensions");
  JAX_MAGI_RETURN_IF_ERROR(CheckDims(context, {"sum", sum}, {dims[0], dims[2], sum_dims[2]}));
  JAX_MAGI_RETURN_IF_ERROR(CheckDType(context, {"sum", sum}, {ffi::F32}));
  JAX_MAGI_RETURN_IF_ERROR(CheckDType(context, {"dq", *dq}, {ffi::F32, ffi::BF16, ffi::F16}));
  JAX_MAGI_RETURN_IF_ERROR(CheckAligned(context, {{"sum", sum}, {"dq", *dq}}));
  if (dims[1] >= kUnbounded) return Invalid(context, "dq", "must be shorter than 2**30 rows");
  if (dims[3] % 8) return Invalid(context, "dq", "must have a multiple of 8 dims");
  BackwardArgs args{};
  args.shape.batch = dims[0];
  args.shape.q_len = dims[1];
  args.shape.num_q_heads = dims[2];
  args.shape.head_dim = dims[3];
  args.params.softmax_scale = softmax_scale;
  args.dq = dq->untyped_data();
  args.dq_dtype = args.dkv_dtype = ToDType(dq->element_type());
  args.dq_sum = static_cast<float*>(sum.untyped_data());
  args.dq_sum_words = sum_dims[2];
  return ToError(context, cuda::FinishDqSum(args, stream));
}

// Checks what a tile list is to be made of, and where; `request` has its shape and slices already.
ffi::Error DecodeListRequest(const char* context, int32_t tile_stamp, ffi::AnyBuffer tile_list,
                             cuda::ListRequest* request) {
  AttentionShape& shape = request->shape;
  JAX_MAGI_RETURN_IF_ERROR(CheckAligned(context, {{"tile_list", tile_list}}));
  if (shape.q_len < 0 || shape.q_len >= kUnbounded) {
    return Invalid(context, "q_len", "is out of range");
  }
  if (shape.k_len < 0 || shape.k_len >= kUnbounded) {
    return Invalid(context, "k_len", "is out of range");
  }
  const cuda::Tiling tiling = cuda::Tiling::OfStamp(tile_stamp);
  JAX_MAGI_RETURN_IF_ERROR(CheckStamp(context, tile_stamp % cuda::kBlocksStamp, tiling.stamp()));
  if (tiling.num_rows == 0 || tiling.num_columns == 0) {
    return Invalid(context, "tile_stamp", "has tiles without rows or columns");
  }
  const std::string too_large = cuda::TooLarge(shape, tiling, /*is_list_known=*/false);
  if (!too_large.empty())
    return ffi::Error::InvalidArgument(std::string(context) + ": " + too_large);
  if (static_cast<int64_t>(tile_list.size_bytes()) < cuda::TileListBytes(shape, tiling)) {
    return Invalid(context, "tile_list", "is too small");
  }
  request->tiling = tiling;
  request->list = static_cast<cuda::TileList*>(tile_list.untyped_data());
  return ffi::Error::Success();
}

// One list for each call. Slices of the calls follow one another, for each batch element.
// `lacks` tells what each list lacks, as a number of Lacks.
ffi::Error MakeTileLists(cudaStream_t stream, ffi::AnyBuffer slices, ffi::RemainingRets tile_lists,
                         int32_t q_len, ffi::Span<const int32_t> k_lens,
                         ffi::Span<const int32_t> num_slices, ffi::Span<const int32_t> tile_stamps,
                         ffi::Span<const int32_t> lacks) {
  const char* context = "jax_magi attention tile lists";
  JAX_MAGI_RETURN_IF_ERROR(CheckSlices(context, slices));
  const size_t num_lists = tile_lists.size();
  if (k_lens.size() != num_lists || num_slices.size() != num_lists ||
      tile_stamps.size() != num_lists || lacks.size() != num_lists) {
    return Invalid(context, "tile_list",
                   "must have a k_len, num_slices, tile_stamp and lacks each");
  }
  const int64_t total = slices.dimensions()[1];
  if (total > std::numeric_limits<int32_t>::max())
    return Invalid(context, "slices", "are too many");
  int64_t first = 0;
  std::vector<cuda::ListRequest> requests(num_lists);
  for (size_t i = 0; i < num_lists; ++i) {
    if (num_slices[i] < 0) return Invalid(context, "num_slices", "must not be negative");
    cuda::ListRequest& request = requests[i];
    request.shape.batch = slices.dimensions()[0];
    request.shape.q_len = q_len;
    request.shape.k_len = k_lens[i];
    request.shape.num_slices = num_slices[i];
    request.slices = static_cast<const Slice*>(slices.untyped_data()) + first;
    request.slice_stride = static_cast<int>(total);
    if (lacks[i] < 0 || lacks[i] > static_cast<int32_t>(cuda::Lacks::kUnmarked)) {
      return Invalid(context, "lacks", "must be 0, 1 or 2");
    }
    request.lacks = static_cast<cuda::Lacks>(lacks[i]);
    auto tile_list = tile_lists.get<ffi::AnyBuffer>(i);
    if (!tile_list.has_value()) return tile_list.error();
    JAX_MAGI_RETURN_IF_ERROR(DecodeListRequest(context, tile_stamps[i], **tile_list, &request));
    if (request.lacks != cuda::Lacks::kNothing && request.tiling.by_keys) {
      return Invalid(context, "lacks", "is for forward calls");
    }
    first += num_slices[i];
  }
  if (first != total) return Invalid(context, "slices", "must be those of all lists");
  if (slices.dimensions()[0] == 0) return ffi::Error::Success();
  return ToError(context, cuda::MakeTileLists(requests, stream));
}

ffi::Error MakeTileList(cudaStream_t stream, ffi::AnyBuffer slices,
                        ffi::Result<ffi::AnyBuffer> tile_list, int32_t q_len, int32_t k_len,
                        int32_t tile_stamp) {
  const char* context = "jax_magi attention tile list";
  JAX_MAGI_RETURN_IF_ERROR(CheckSlices(context, slices));
  cuda::ListRequest request{};
  request.shape.batch = slices.dimensions()[0];
  request.shape.q_len = q_len;
  request.shape.k_len = k_len;
  request.shape.num_slices = slices.dimensions()[1];
  request.slices = static_cast<const Slice*>(slices.untyped_data());
  JAX_MAGI_RETURN_IF_ERROR(DecodeListRequest(context, tile_stamp, *tile_list, &request));
  request.slice_stride = static_cast<int>(request.shape.num_slices);
  if (request.shape.batch == 0) return ffi::Error::Success();
  return ToError(context, cuda::MakeTileLists({request}, stream));
}

}  // namespace
}  // namespace jax_magi

namespace ffi = xla::ffi;

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_magi_cuda_attention_forward, jax_magi::Forward,
                              jax_magi::ForwardBinding<ffi::PlatformStream<cudaStream_t>>(),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_magi_cuda_attention_backward, jax_magi::Backward,
                              jax_magi::BackwardBinding<ffi::PlatformStream<cudaStream_t>>(),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_magi_cuda_attention_finish_dq, jax_magi::FinishDq,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()  // sum
                                  .Ret<ffi::AnyBuffer>()  // dq
                                  .Attr<float>("softmax_scale"),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_magi_cuda_attention_tile_list, jax_magi::MakeTileList,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()  // slices
                                  .Ret<ffi::AnyBuffer>()  // tile_list
                                  .Attr<int32_t>("q_len")
                                  .Attr<int32_t>("k_len")
                                  .Attr<int32_t>("tile_stamp"),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_magi_cuda_attention_tile_lists, jax_magi::MakeTileLists,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()  // slices
                                  .RemainingRets()        // tile_list of each call
                                  .Attr<int32_t>("q_len")
                                  .Attr<ffi::Span<const int32_t>>("k_lens")
                                  .Attr<ffi::Span<const int32_t>>("num_slices")
                                  .Attr<ffi::Span<const int32_t>>("tile_stamps")
                                  .Attr<ffi::Span<const int32_t>>("lacks"),
                              {ffi::Traits::kCmdBufferCompatible});

jax_magi::AttentionNeeds jax_magi_cuda_attention_needs(const jax_magi::AttentionCall& call,
                                                       const jax_magi::Slice* slices) {
  return jax_magi::cuda::NeedsOf(call, slices);
}

std::map<std::string, int64_t> jax_magi_cuda_read_tile_stamp(int32_t stamp) {
  const auto tiling = jax_magi::cuda::Tiling::OfStamp(stamp);
  return {{"num_rows", tiling.num_rows},
          {"num_columns", tiling.num_columns},
          {"by_keys", tiling.by_keys},
          {"aligns_keys", tiling.aligns_keys},
          {"architecture", static_cast<int64_t>(tiling.architecture)},
          {"num_blocks", jax_magi::cuda::BlocksOfStamp(stamp)}};
}

int32_t jax_magi_cuda_stamp_of_blocks(int64_t num_blocks) {
  return jax_magi::cuda::StampOfBlocks(num_blocks);
}

std::map<std::string, std::vector<std::string>> jax_magi_cuda_variants() {
  std::map<std::string, std::vector<std::string>> variants = {
      {"softmax", {"float32", "bfloat16", "float16"}}};
  for (const jax_magi::Architecture architecture : jax_magi::kArchitectures) {
    std::vector<std::string> names = jax_magi::cuda::NamesOfVariants(architecture);
    if (names.empty()) continue;
    variants[std::string("attention ") + NameOf(architecture)] = std::move(names);
  }
  return variants;
}
