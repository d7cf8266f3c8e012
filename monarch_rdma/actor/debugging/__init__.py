"""Looking into running programs: stacks, states, breakpoints."""
