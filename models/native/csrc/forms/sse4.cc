// Every kernel, for processors with what `Sse4` stands for.
#include "../attention.inl"
#include "../expanded/expanded_attention.inl"
#include "../experts.inl"
#include "../stacked_product.inl"

namespace moonshard {

template struct Attention<Sse4>;
template struct ExpandedAttention<Sse4>;
template struct Experts<Sse4>;
template struct Exponential<Sse4>;
template struct StackedProduct<Sse4>;

}  // namespace moonshard
