//! Errors with their causes, for logs and responses.

use std::error::Error;
use std::fmt;

/// Shows an error and its sources on one line: `loading the issuer: reading crt.pem: no such file`. A source that the error
/// repeats in its own text is left out.
pub struct ErrorChain<'a>(pub &'a (dyn Error + 'a));

impl fmt::Display for ErrorChain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = self.0.to_string();
        let mut source = self.0.source();
        while let Some(cause) = source {
            let cause_text = cause.to_string();
            if !text.contains(&cause_text) {
                text = format!("{text}: {cause_text}");
            }
            source = cause.source();
        }
        f.write_str(&text)
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("reading the bundle")]
    struct ReadError(#[source] io::Error);

    #[derive(Debug, thiserror::Error)]
    #[error("writing: {0}")]
    struct RepeatingError(#[source] io::Error);

    #[test]
    fn all_causes_are_shown_in_order() {
        let error = ReadError(io::Error::other("the disk is full"));
        assert_eq!(ErrorChain(&error).to_string(), "reading the bundle: the disk is full");
        assert_eq!(ErrorChain(&io::Error::other("alone")).to_string(), "alone");
        let repeated = RepeatingError(io::Error::other("the disk is full"));
        assert_eq!(ErrorChain(&repeated).to_string(), "writing: the disk is full");
    }
}
