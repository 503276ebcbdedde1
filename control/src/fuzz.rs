//! What must hold of manifests, whatever is in them: a fuzz target tries it with bytes of its making, and the test here with
//! those that it found worth keeping.

use crate::resources::event::Event;
use crate::source;

/// A file of manifests is read or refused, at a line that it may have; and in the same way each time.
pub fn manifests(bytes: &[u8]) {
    let (events, errors) = source::of_one_file(bytes);
    for error in &errors {
        // YAML has many a line break; and what is missing at the end is missing on the line behind it.
        let may_exist = error.line.is_none_or(|line| (1..=bytes.len() + 2).contains(&line));
        assert!(may_exist, "{error:?} of {} bytes", bytes.len());
    }
    let (again, errors_again) = source::of_one_file(bytes);
    assert_eq!(errors, errors_again);
    assert_eq!(events.len(), again.len());
    for pair in events.iter().zip(&again) {
        match pair {
            (Event::Applied(one), Event::Applied(other)) => assert_eq!(one, other),
            _ => panic!("{pair:?} of a file that is new"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    #[test]
    fn manifests_that_were_kept_hold() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus/manifests");
        let mut n = 0;
        for file in fs::read_dir(&dir).unwrap() {
            let path = file.unwrap().path();
            println!("{}", path.display());
            super::manifests(&fs::read(path).unwrap());
            n += 1;
        }
        assert!(n > 0, "{} is empty", dir.display());
    }
}
