"""Where the code lives. Public modules only re-export; rooms know nothing of those above them."""
