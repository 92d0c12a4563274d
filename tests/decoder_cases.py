"""A tabular pair with known distribution, every drafter, verifier and cache for it, and for the shipped pair."""

from collections import abc
from collections.abc import Callable
from copy import copy
from functools import cache, partial
from types import SimpleNamespace
from unittest.mock import patch

import torch
from tabular import TabularMarkov, by_class, random_table
from torch import Tensor

from specbench.cache.dynamic import DynamicCache
from specbench.cache.paged import PagedCache
from specbench.cache.slots import SlotCache, StaticCache
from specbench.decoding.draft import Draft
from specbench.decoding.noise import PROPOSAL, node_bits, prompt_key, uniforms
from specbench.decoding.sampling import Sampling
from specbench.decoding.scheduler import Scheduler
from specbench.decoding.sequence import Sequence
from specbench.decoding.speculative import decode_autoregressive, decode_speculative, ignore
from specbench.decoding.state import State
from specbench.decoding.timer import Clock, Timer
from specbench.decoding.token_tree import MISSING, ROOT, branching_tree, tree_of
from specbench.decoding.transfers import upload
from specbench.drafters.base import Drafter
from specbench.drafters.blockwise import BlockwiseDrafter, MedusaDrafter
from specbench.drafters.dflash import DFlashDrafter, DFlashModel
from specbench.drafters.eagle3 import Eagle3Drafter, Eagle3Model
from specbench.drafters.early_exit import EarlyExitDrafter
from specbench.drafters.hierarchical import HierarchicalDrafter
from specbench.drafters.model import ModelDrafter
from specbench.drafters.mtp import MtpDrafter
from specbench.drafters.multi_draft import MultiDrafter
from specbench.drafters.ngram_lm import BigramDrafter, RandomDrafter, UnigramDrafter, training_tokens
from specbench.drafters.pair_model import PairInput, PairModel
from specbench.drafters.parallel import ParallelDrafter, PassDrafter
from specbench.drafters.suffix import NgramDrafter, PromptLookupDrafter, SuffixDrafter
from specbench.drafters.tree import TreeDrafter
from specbench.drafters.tree_shapes import CHILDREN, BlockTreeSettings, DynamicTree, FixedTree, SampledTree, widths
from specbench.executors.base import Executor
from specbench.executors.eager import EagerExecutor
from specbench.models.heads import Heads, LookAhead, load_part
from specbench.models.language_model import BorrowedCache, LanguageModel
from specbench.models.layers import first_layers
from specbench.policies.base import FixedGamma, GammaPolicy
from specbench.verifiers.base import SpeculativeVerifier, Verifier
from specbench.verifiers.chains import BlockVerifier, RejectionVerifier
from specbench.verifiers.trees import IterativeVerifier, MatchVerifier, TraversalVerifier

CACHES: dict[str, Callable[[int, int], SlotCache]] = {
    "static": StaticCache,
    "dynamic": DynamicCache,
    "paged": partial(PagedCache, block_size=4),
}
CHAINS = ("model", "ngram", "prompt_lookup", "bigram", "unigram", "random", "blockwise",
          "pass_lookahead", "early_exit", "mtp", "eagle3", "under_ngram",
          "under_under_model", "suffix")  # fmt: skip
TREES = ("tree_independent", "tree_distinct", "tree_best", "tree_dynamic", "tree_sampled", "multi_draft",
         "multi_draft_two", "medusa", "own_trees", "mtp_distinct", "eagle3_dynamic")  # fmt: skip
DRAFTERS = CHAINS + TREES
TABULAR = ("dflash", "dspark")  # chains too, of which there is a stand-in for a tabular target alone
VERIFIERS = {
    kind.__name__.removesuffix("Verifier").lower(): kind
    for kind in (SpeculativeVerifier, IterativeVerifier, MatchVerifier, BlockVerifier, RejectionVerifier,
                 TraversalVerifier)
}  # fmt: skip
V = 16
SAMPLED, GREEDY = Sampling(), Sampling(temperature=0)
WIDTH = 3  # nodes at each depth of `OwnTrees`
BLOCK_TREES = ("_best", "_drawn")


class DigitTokenizer:
    """Tokens are the numbers below `size`, separated by spaces."""

    eos_token_id = None
    bos_token_id = None
    chat_template = None
    backend_tokenizer = None

    def __init__(self, size: int = V):
        self.size = size

    def __call__(self, texts, add_special_tokens=True, verbose=True):
        if isinstance(texts, str):
            return {"input_ids": [int(t) for t in texts.split()]}
        return {"input_ids": [self(text)["input_ids"] for text in texts]}

    def decode(self, tokens, skip_special_tokens=True):
        return " ".join(map(str, tokens))

    def get_vocab(self):
        return {str(i): i for i in range(self.size)}


def adapted(
    module: torch.nn.Module, sampling: Sampling = SAMPLED, cache: str | Callable[[int, int], SlotCache] = "static",
    executor: Executor | None = None, tokens: int = V, vocab_size: int | None = None,
) -> LanguageModel:  # fmt: skip
    """A module behind the ordinary adapter. Its tokenizer knows so many `tokens`."""
    new_cache = CACHES[cache] if isinstance(cache, str) else cache
    return LanguageModel(module, DigitTokenizer(tokens), name="tiny", sampling=sampling, new_cache=new_cache,
                         executor=executor or EagerExecutor(), vocab_size=vocab_size)  # fmt: skip


def tabular_model(
    table: torch.Tensor, sampling: Sampling, cache: str | Callable[[int, int], SlotCache] = "static",
    context: int = 64, executor: Executor | None = None, device: torch.device | None = None,
    vocab_size: int | None = None,
) -> LanguageModel:  # fmt: skip
    """An order-2 Markov chain behind the ordinary adapter."""
    module = TabularMarkov(table, context=context).to(device)
    return adapted(module, sampling, cache, executor, vocab_size=vocab_size)


def verifier_of(kind: type[Verifier], sampling: Sampling, lenience: float = 1.0) -> Verifier:
    """A verifier that has no settings of its own."""
    return kind.from_settings(kind.Settings(), sampling, lenience)


class OwnTrees(Drafter):
    """Rows have trees of their own, with missing nodes and equal siblings; guesses uniform or point masses."""

    trees = True

    def __init__(self, vocab_size: int, greedy: bool):
        self.vocab_size, self.greedy = vocab_size, greedy

    def propose(self, state, gamma):
        depth, rows = self.steps(gamma), state.batch_size
        if not depth:
            return Draft.empty(rows, state.tokens.device)
        levels = (WIDTH,) * depth
        bits, others = (node_bits(state.noise[PROPOSAL], state.length, levels, stream) for stream in (0, 1))
        shape = (uniforms(others) * (WIDTH + 1)).long()  # a parent's number on its level, or none
        limit = upload(gamma, bits.device)[:, None]
        above = torch.full((rows, WIDTH), ROOT, device=bits.device)
        parents = []
        for begin in range(0, depth * WIDTH, WIDTH):
            which = shape[:, begin : begin + WIDTH]
            if begin:
                found = above.gather(1, which.clamp(max=WIDTH - 1))
                parent = torch.where(found == MISSING, MISSING, 1 + which + begin - WIDTH)
            else:
                parent = above
            there = (which < WIDTH) & (begin // WIDTH < limit)
            above = torch.where(there, parent, MISSING)
            parents.append(above)
        tokens = (uniforms(bits) * self.vocab_size).long()
        q = torch.full((*tokens.shape, self.vocab_size), 1 / self.vocab_size, device=bits.device)
        q = None if self.greedy else q
        count = torch.full((rows,), depth * WIDTH, device=bits.device)
        return Draft(tokens, levels, torch.cat(parents, 1), q, count, repeats=True)


def spare_of(kind: str, gamma: int) -> int:
    """Cache columns that a draft of `make_drafter(kind, ...)` may take, and one."""
    if kind == "own_trees":
        return WIDTH * gamma + 1
    if kind.endswith(("_dynamic", "_sampled")) or (kind.endswith(BLOCK_TREES) and kind != "tree_best"):
        return max(7, 3 * gamma) + 1
    if kind.endswith(CHILDREN):
        return len(branching_tree(widths([3, 2], gamma))) + 1
    if kind.startswith("multi_draft"):
        return 4 * gamma + 1
    if kind.startswith("under_"):
        return gamma + 4  # its inner gamma is 2, of a drafter below too
    return 7 if kind == "medusa" else gamma + 1


def shape_of(kind: str, sampling: Sampling) -> FixedTree | DynamicTree | None:
    """The shape of the trees of `make_drafter(kind, ...)`, None for chains."""
    if kind.endswith(("_dynamic", "_sampled")):
        return (SampledTree if kind.endswith("_sampled") and not sampling.greedy else DynamicTree)(nodes=7, width=3)
    children = "best" if sampling.greedy else kind.rpartition("_")[2]
    return FixedTree([3, 2], children) if kind.endswith(CHILDREN) else None


def another(model: LanguageModel) -> LanguageModel:
    """A copy with a cache of its own; a tabular one has another table, so that exchanged q's are seen."""
    twin = copy(model)
    twin.free()
    if isinstance(model.module, TabularMarkov):
        table = model.module.output.weight.unflatten(0, (-1, model.own_vocab_size))
        other = by_class(random_table(model.own_vocab_size, seed=6)).to(table.device)
        twin.module = TabularMarkov((0.5 * table + other).to(table.dtype), context=model.context)
    return twin


def make_drafter(kind: str, target: LanguageModel, text_file: str, drafter_model: LanguageModel | None = None):
    """Any drafter for a target; `text_file` is what the count models are fitted on."""
    V, sampling, model = target.vocab_size, target.sampling, drafter_model
    if kind == "model":
        return ModelDrafter(model, V, gamma=5)
    if kind == "ngram":
        return NgramDrafter(2, 4)
    if kind == "prompt_lookup":
        return PromptLookupDrafter(max_match=3, min_match=1)
    if kind == "suffix":
        return SuffixDrafter(8, 1.0, 1.0, 0.1, gamma=5)
    if kind == "bigram":
        return BigramDrafter(training_tokens(text_file, target.tokenizer), V, sampling, smoothing=1.0)
    if kind == "unigram":
        return UnigramDrafter(training_tokens(text_file, target.tokenizer), V, sampling)
    if kind == "own_trees":
        return OwnTrees(V, sampling.greedy)
    if kind == "random":
        return RandomDrafter(V, sampling.greedy)
    if kind.startswith("tree_"):
        return TreeDrafter(model, V, 5, shape_of(kind, sampling))
    if kind.startswith("multi_draft"):
        models = [model, another(model)] if kind.endswith("two") else [model]
        return MultiDrafter(models, 2, V, 5)
    if kind.startswith("under_"):  # hierarchical: this drafter under the model
        below = make_drafter(kind.removeprefix("under_"), model, text_file, another(model))
        if kind == "under_blockwise":  # of heads that read the pair itself, not another one
            below.heads.forward = lambda hidden: hidden[..., None, :].expand(-1, below.longest, -1)
        return HierarchicalDrafter(model, below, 2, V)
    return self_drafter(kind, target, drafter_model)


@cache
def extras(kind: type, name: str, model: LanguageModel):
    """What was trained for a shipped model, loaded once."""
    return load_part(kind, f"shipped:{name}", f"drafter.{name}", model)


def self_drafter(kind: str, target: LanguageModel, drafter_model: LanguageModel | None):
    """Drafters that are parts of the target: trained for the shipped one, or stand-ins for a tabular one."""
    tabular = isinstance(target.module, TabularMarkov)
    block = kind.partition("_")[0]  # dflash_best and dflash_drawn are trees of it
    if block in ("blockwise", "medusa"):
        heads = PairHeads() if tabular else extras(Heads, "heads", target)
        if kind == "medusa":
            return MedusaDrafter(target, heads, target.sampling, size=6, gamma=4)
        return as_tree(BlockwiseDrafter(target, heads, target.sampling), kind)
    if kind == "early_exit":
        short = drafter_model.module if tabular else first_layers(target.module, 1)
        return EarlyExitDrafter(BorrowedCache(short, target, "exit", target.sampling), target.vocab_size, 5)
    shape = shape_of(kind, target.sampling)
    if kind.startswith("mtp"):
        module = pair_table(drafter_model.module) if tabular else first_layer_of_pairs(target.module)
        return MtpDrafter(PairModel(module, target, kind, target.sampling, gamma=4), target.vocab_size, 4, shape)
    if kind.startswith("eagle3"):
        module = pair_table(drafter_model.module) if tabular else first_layer_of_pairs(target.module)
        targets = torch.arange(target.vocab_size, device=target.device)[3:]  # of the draft model's own vocabulary
        module.features, tokens = torch.nn.Identity(), SomeTokens(module.get_output_embeddings(), targets)
        setattr(module, "output" if tabular else "lm_head", tokens)
        model = Eagle3Model(module, target, kind, target.sampling, 4, (), normed=True, targets=targets)
        return Eagle3Drafter(model, target.vocab_size, 4, shape)
    if block in ("dflash", "dspark"):
        network = PairBlocks(target.module, markov=block == "dspark")
        return as_tree(DFlashDrafter(DFlashModel(network, BLOCKS, target.vocabulary, target), target.sampling, V), kind)
    model = BorrowedCache(target.module, target, "ahead", target.sampling)
    ahead = PairAhead() if tabular else extras(LookAhead, "lookahead", model)
    return as_tree(PassDrafter(model, ahead, target.vocab_size, 4), kind)


def as_tree(drafter: ParallelDrafter, kind: str) -> ParallelDrafter:
    """The drafter, with trees of 7 guesses if the kind ends with how they are chosen."""
    nodes, children = 7 if kind.endswith(BLOCK_TREES) else None, "best" if kind.endswith("_best") else "distinct"
    settings = BlockTreeSettings(nodes=nodes, children=children, width=3)
    drafter.draft_as(settings.block_shape(drafter.sampling, drafter.sampling.greedy, drafter.vocab_size))
    return drafter


class PairHeads(torch.nn.Module):
    """Heads of a tabular target: head k reads another row of its table."""

    own_outputs, logits = False, Heads.logits

    def __init__(self, heads: int = 4):
        super().__init__()
        falling = [[0.5 / (k + i + 1) for i in range(4)] for k in range(heads)]
        self.config = SimpleNamespace(heads=heads, hidden_size=1, accuracy=falling)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        steps = torch.arange(self.config.heads)[:, None]
        return (hidden[..., None, :] * 7 + 31 * steps) % (V * V)


class SomeTokens(torch.nn.Module):
    """An output matrix [..., V'] for some of the tokens."""

    def __init__(self, output: torch.nn.Module, targets: torch.Tensor):
        super().__init__()
        self.output = output
        self.register_buffer("targets", targets)

    @property
    def weight(self) -> torch.Tensor:
        return self.output.weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.output(hidden)[..., self.targets]


class PairBlocks(torch.nn.Module):
    """A DFlash network of a tabular target. The keys of its one layer are hidden states, the numbers of pairs; the
    state of row j of a block follows from the last pair before the block, the block's token and j. `markov` is a bias
    by the token before."""

    def __init__(self, module: TabularMarkov, markov: bool):
        super().__init__()
        self.fc, self.embed_tokens = torch.nn.Linear(1, 1), module.get_input_embeddings()
        self.lm_head = module.get_output_embeddings()
        self.markov_head = torch.nn.Embedding.from_pretrained(random_table(V, 8)[0]) if markov else None
        self.confidence_head, self.target = self.markov_head, module.output.weight.view(V, V, V).softmax(-1)

    def estimate(self, states, before):
        """Three times too sure: of sum_x min(p, q), of which it does not know one of the tokens that p depends on."""
        q = (self.lm_head(states) + self.markov_head(before)).softmax(-1)
        return 3 * torch.minimum(self.target[:, before], q).sum(-1).mean(0).logit()

    def context(self, features, first):
        return features[None, None, :, None].expand(1, 2, -1, -1, -1, -1)

    def forward(self, block, context, first):
        last = context[0, 0, :, 0].gather(1, first[:, None, None] - 1)
        return (last * 7 + 31 * torch.arange(block.shape[1])[:, None] + 5 * block[:, :1]) % (V * V)


LAYER = SimpleNamespace(
    num_hidden_layers=1, num_key_value_heads=1, head_dim=1, hidden_size=1, max_position_embeddings=64
)
BLOCKS = SimpleNamespace(longest=4, options=SimpleNamespace(block_size=5, mask_token_id=0), layers=LAYER)


class PairNumbers(torch.nn.Module):
    """The pair input of a tabular module: a token that depends on the next token, and on the hidden state before it."""

    def forward(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return (embedded + 5 * (hidden % 7)) % V


def pair_table(module: TabularMarkov) -> TabularMarkov:
    """A stand-in for a multi-token-prediction module: another chain, over these tokens."""
    table = module.output.weight.unflatten(0, (-1, module.config.vocab_size))
    own = TabularMarkov(table, context=module.config.max_position_embeddings)
    own.pair_input = PairNumbers()
    return own


def first_layer_of_pairs(module):
    """A stand-in for a module: the first layer, which reads an embedding and some of the state before it."""
    short, size = first_layers(module, 1), module.config.hidden_size
    like = next(module.parameters())
    projection = torch.nn.Linear(2 * size, size, bias=False, device=like.device, dtype=like.dtype)
    eye = torch.eye(size, device=like.device, dtype=like.dtype)
    projection.weight.copy_(torch.cat([eye, 0.02 * eye], 1))
    short.pair_input = PairInput(torch.nn.Identity(), torch.nn.Identity(), projection)
    return short


class PairAhead(torch.nn.Module):
    """Look-ahead embeddings of a tabular model: certain tokens."""

    def __init__(self):
        super().__init__()
        self.embeddings = torch.tensor([[3.0], [9.0], [5.0]])
        self.config = SimpleNamespace(count=3, hidden_size=1)


def texts_of(draft: Draft, row: int) -> dict[int, tuple[int, ...]]:
    """The text of each guess that a row of a tree has, by column, from the root on."""
    texts: dict[int, tuple[int, ...]] = {ROOT: ()}
    parents, there = draft.parents.expand_as(draft.tokens)[row].tolist(), draft.exists()[row].tolist()
    for node, (above, token) in enumerate(zip(parents, draft.tokens[row].tolist(), strict=True), ROOT + 1):
        if there[node - 1]:
            texts[node] = (*texts[above], token)
    return {node - 1: text for node, text in texts.items() if text}


def generated_by(module, read: abc.Sequence[int], new: int) -> list[int]:
    """The new tokens of transformers' own loop at temperature 0."""
    ids = torch.tensor([read])
    text = module.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)
    return text[0, 1 if module.config.is_encoder_decoder else len(read) :].tolist()


def one_late(self, tokens, hidden, first, last, *others, predict=PairModel.predict):
    """In place of `PairModel.predict`: pairs of the model's own states stand one position further on."""
    return predict(self, tokens, hidden, first + 1 if last is None else first, last, *others)


WRONG_PAIRS = {"take": lambda *given: None, "predict": one_late}  # without `take`, rejected pairs stay pending


def logits_of(model: LanguageModel, tokens: Tensor, starts: abc.Sequence[int], draft: Draft | None = None) -> Tensor:
    """Logits [B, N, V] of tokens [B, N], of which the first is at position starts[b] in row b, after a rollback."""
    visible = model.rollback_to(starts, tokens.shape[1])
    tree = None if draft is None or draft.parent is None else tree_of(draft.levels, draft.parent)
    return model.forward(tokens, torch.tensor(starts, device=model.device), visible, tree=tree)


def queued(target: LanguageModel, drafter: Drafter | None, jobs: abc.Sequence[Sequence], rows: int, verifier: Verifier,
           policy: GammaPolicy | None = None, chunk: int = 2048, spare: int = 1, after_round=ignore,
           clock: Clock | None = None, arrivals: list[float] | None = None, watch=None,
           stops: abc.Sequence[int] = ()) -> Scheduler:  # fmt: skip
    """The queue of jobs that were decoded through so many rows, plainly without a drafter. `spare` are columns behind
    the longest text, and `watch` is called whenever the queue was asked."""
    state = State.idle(rows, max(job.limit for job in jobs) + spare, stops, target.device)
    target.allocate(rows, state.tokens.shape[1])
    queue = Scheduler(jobs, [target, *(drafter.models if drafter else ())], chunk, spare, arrivals)
    clock = clock or Timer(target.device)

    def admit(state, clock):
        more = queue(state, clock)
        if watch is not None:
            watch(state, queue, target)
        return more

    if drafter is None:
        decode_autoregressive(state, target, verifier, clock, after_round, admit)
    else:
        decode_speculative(state, target, drafter, policy, verifier, clock, after_round, admit)
    return queue


def noted_drafts(parts, gamma=3, tokens=24, policy=None, batch=2, prompts=((5, 9, 2, 7, 11, 3, 8), (4, 1, 6)),
                 alone=False):  # fmt: skip
    """For each draft of a row of ragged texts the text before it, its guesses [n] and their q [n, V]."""
    target, drafter, found = parts.target, parts.drafter, []
    jobs = [Sequence(list(own), len(own) + tokens, prompt_key(0, str(i))) for i, own in enumerate(prompts)]
    propose = drafter.propose

    def noted(state, gammas):
        draft = propose(state, gammas)
        for row, sequence in enumerate(state.sequences):
            if state.active[row] and gammas[row] and draft.probs is not None:
                n = int(draft.count[row])
                found.append((list(sequence.tokens), draft.tokens[row, :n], draft.probs[row, :n].clone()))
        return draft

    with patch.object(drafter, "propose", noted), patch(f"{__name__}.Scheduler", partial(Scheduler, alone=alone)):
        queued(target, drafter, jobs, batch, parts.verifier, policy or FixedGamma(gamma), 4, parts.spare)
    return found
