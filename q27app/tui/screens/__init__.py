"""What fills the terminal: monitor, chat, models, logs, help, and the small dialogs over them."""
