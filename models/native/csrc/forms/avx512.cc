// Every kernel, for processors with what `Avx512` stands for.
#include "../attention.inl"
#include "../expanded/expanded_attention.inl"
#include "../experts.inl"
#include "../stacked_product.inl"

namespace moonshard {

template struct Attention<Avx512>;
template struct ExpandedAttention<Avx512>;
template struct Experts<Avx512>;
template struct Exponential<Avx512>;
template struct StackedProduct<Avx512>;

}  // namespace moonshard
