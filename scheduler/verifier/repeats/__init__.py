"""Proofs by induction: a proof for few repetitions of a layer holds for many."""
