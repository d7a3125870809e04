"""The sizes of the example decoder."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the model. Every request has at most ``max_seq_len`` tokens."""

    vocab_size: int = 256
    dim: int = 160
    mlp_dim: int = 320
    layers: tuple[str, ...] = ("mamba", "attention", "delta", "attention")
    num_drafts: int = 3

    # Sparse MLA: the cache holds ``latent_dim + rope_dim`` numbers a token.
    num_heads: int = 4
    nope_dim: int = 32
    rope_dim: int = 16
    value_dim: int = 32
    latent_dim: int = 64

    # Indexer
    index_heads: int = 4
    index_dim: int = 32
    topk: int = 64

    # Mamba-2 and gated delta
    conv_width: int = 4
    mamba_heads: int = 10
    mamba_head_dim: int = 32
    mamba_state_dim: int = 32
    delta_heads: int = 4
    delta_key_dim: int = 32
    delta_value_dim: int = 64

    @property
    def next_n(self) -> int:
        """Query tokens of a verify row: the last accepted token and the drafts."""
        return 1 + self.num_drafts

    @property
    def kv_dim(self) -> int:
        return self.latent_dim + self.rope_dim

    @property
    def mamba_dim(self) -> int:
        return self.mamba_heads * self.mamba_head_dim

    @property
    def mamba_conv_dim(self) -> int:
        return self.mamba_dim + 2 * self.mamba_state_dim

    @property
    def delta_conv_dim(self) -> int:
        return self.delta_heads * (2 * self.delta_key_dim + self.delta_value_dim)
