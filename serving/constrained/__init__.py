"""Constrained decoding: what a grammar lets an answer say, from the client's schema to the bits that a draw obeys.

A grammar is a text in llguidance's form of Lark, of a whole answer as tokens: its thought, its text, its calls. The
gateway writes it (`answer`) from what was asked (`parts`, whose JSON schemas `schemas` looks at) and checks it
(`grammars`); it travels with the request, and each worker compiles it anew (`grammars`) and follows its sequences
through it (`masks`). What a sequence may say next follows from its tokens alone, so a request goes on anywhere: after a
handoff, a preemption or the loss of a worker.
"""
