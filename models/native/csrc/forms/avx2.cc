// Every kernel, for processors with what `Avx2` stands for.
#include "../attention.inl"
#include "../expanded/expanded_attention.inl"
#include "../experts.inl"
#include "../stacked_product.inl"

namespace moonshard {

template struct Attention<Avx2>;
template struct ExpandedAttention<Avx2>;
template struct Experts<Avx2>;
template struct Exponential<Avx2>;
template struct StackedProduct<Avx2>;

}  // namespace moonshard
