"""Recurrent layers: state spaces, RWKV, linear attention and the gated delta net."""
