"""From logits to text: tokens chosen, by a grammar or with a draft ahead, and conversations of them."""
