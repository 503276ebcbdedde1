//! Enums whose variants have a word in the table.

/// Defines an enum that is parsed and printed as words.
macro_rules! words {
    ($(#[$doc:meta])* $name:ident { $($(#[$what:meta])* $variant:ident = $word:literal,)+ }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub(super) enum $name { $($(#[$what])* $variant,)+ }

        #[allow(dead_code)] // not every enum uses all of it
        impl $name {
            pub(super) const ALL: &[Self] = &[$(Self::$variant,)+];

            pub(super) fn word(self) -> &'static str {
                match self { $(Self::$variant => $word,)+ }
            }

            /// The variant of a word in the table.
            pub(super) fn parse(word: &str) -> Self {
                let found = Self::ALL.iter().find(|value| value.word() == word);
                *found.unwrap_or_else(|| panic!("unknown word {word:?} in the table, expected a {}", stringify!($name)))
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.word())
            }
        }
    };
}

pub(super) use words;
