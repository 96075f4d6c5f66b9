"""The engine that serves many generation requests over one model: slots, the scheduling of steps, a prefix cache."""
