//! See the sections below.
