"""From one device's graph to its program: strides, order, memory, and what undoes a step that fails."""
