//! The text format of Prometheus, version 0.0.4, which every scraper reads.

use std::fmt::Write;

use rdmux_verbs::Histogram;

/// Type of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Counter,
    Gauge,
    Histogram,
}

impl Kind {
    fn word(self) -> &'static str {
        match self {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
            Kind::Histogram => "histogram",
        }
    }
}

/// Metrics in the text format: [`Text::family`] begins each, and its samples follow.
#[derive(Debug, Default)]
pub(super) struct Text {
    text: String,
    family: String,
}

impl Text {
    /// Begins a metric; the samples that follow belong to it.
    pub(super) fn family(&mut self, name: &str, kind: Kind, help: &str) {
        let help = help.replace('\\', "\\\\").replace('\n', "\\n");
        self.put(format_args!(
            "# HELP {name} {help}\n# TYPE {name} {}\n",
            kind.word()
        ));
        self.family = name.to_owned();
    }

    /// Writes a sample. Its name is the metric's name and a suffix.
    pub(super) fn sample(&mut self, suffix: &str, labels: &[(&str, &str)], value: impl std::fmt::Display) {
        let mut line = format!("{}{suffix}", self.family);
        for (i, (name, value)) in labels.iter().enumerate() {
            let value = value
                .replace('\\', "\\\\")
                .replace('"', "\\\"")
                .replace('\n', "\\n");
            let begin = if i == 0 { '{' } else { ',' };
            // Writing to a `String` cannot fail.
            let _ = write!(line, "{begin}{name}=\"{value}\"");
        }
        let end = if labels.is_empty() { "" } else { "}" };
        self.put(format_args!("{line}{end} {value}\n"));
    }

    /// Writes the samples of a histogram, in seconds.
    pub(super) fn histogram(&mut self, labels: &[(&str, &str)], histogram: &Histogram) {
        for (bound_ns, n) in histogram.cumulative() {
            let bound = seconds(bound_ns).to_string();
            self.sample("_bucket", &[labels, &[("le", bound.as_str())]].concat(), n);
        }
        let count = histogram.count();
        self.sample("_bucket", &[labels, &[("le", "+Inf")]].concat(), count);
        self.sample("_sum", labels, seconds(histogram.sum_ns()));
        self.sample("_count", labels, count);
    }

    pub(super) fn finish(self) -> String {
        self.text
    }

    fn put(&mut self, arguments: std::fmt::Arguments<'_>) {
        // Writing to a `String` cannot fail.
        let _ = self.text.write_fmt(arguments);
    }
}

fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sample__labels_are_escaped() {
        let mut text = Text::default();
        text.family("a", Kind::Counter, "b\nc\\");
        text.sample("", &[("x", "\"\\\n"), ("y", "z")], 7);
        text.sample("", &[], 0.5);
        let expected = "# HELP a b\\nc\\\\\n# TYPE a counter\na{x=\"\\\"\\\\\\n\",y=\"z\"} 7\na 0.5\n";
        assert_eq!(text.finish(), expected);
    }

    #[test]
    fn histogram__buckets_sum_and_count() {
        let mut histogram = Histogram::default();
        histogram.record(300);
        histogram.record(1 << 40);
        let mut text = Text::default();
        text.family("h", Kind::Histogram, "h.");
        text.histogram(&[("l", "1")], &histogram);
        let text = text.finish();
        for line in [
            "h_bucket{l=\"1\",le=\"0.000000256\"} 0\n",
            "h_bucket{l=\"1\",le=\"0.000000512\"} 1\n",
            "h_bucket{l=\"1\",le=\"34.359738368\"} 1\n",
            "h_bucket{l=\"1\",le=\"+Inf\"} 2\n",
            "h_sum{l=\"1\"} 1099.511628076\n",
            "h_count{l=\"1\"} 2\n",
        ] {
            assert!(text.contains(line), "{line}{text}");
        }
    }
}
